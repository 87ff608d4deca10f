/* How a call reaches a device by the bell (proto/call_words.h, client/src/stream_words.h). The engine enqueues pairs
 * of a gate and a main kernel ahead, each after a wait for the bell. The pairs of a lane run one after another.
 * Streams call in one ring, the client's host calls in another one. The lane's door says whether calls run (its
 * epoch is odd) or are discarded (even), and whether a pair is inside.
 *
 * -DLINGERS: a main kernel may linger for the next call. It is inside meanwhile, and looks as a gate does.
 * -DHALTS=n: the engine halts the lane n times, changes what operations use, and resumes. -DDEATHS=1: the engine is
 * killed at any time. Its kernels may be cut off. Some of its pairs begin later, even beside its successor's.
 *
 * Never: a call that lies in a ring while everybody sleeps; one that runs or ends twice; one that is discarded
 * although its client had been told that calls run; one that runs in a halted lane; one that a dead engine's pair ends
 * after the successor has opened its lane.
 */
#if defined(MUTANT_NO_GENERATION) || defined(MUTANT_DONE_BEFORE_GENERATION) || defined(MUTANT_OLD_PAIR_INSIDE) || \
    defined(MUTANT_OPENED_SILENTLY) || defined(MUTANT_NOT_SET_AGAIN)
#define DEATHS 1
#endif
#ifndef DEATHS
#define DEATHS 0
#endif
#ifdef MUTANT_LEAVES_SILENTLY
#define LINGERS
#endif
#if DEATHS
#define HALTS 0
#define STREAMS 1
#define HOST 0
#else
#ifndef HALTS
#define HALTS 1
#endif
#define STREAMS 2 /* each calls once, as does the host */
#define HOST 1
#endif
#define LEFT 2 /* pairs of a dead engine that begin after its death */

#define BY_STREAMS 0
#define BY_HOST 1
#define BELL(ring) (ring)
#define RING(ring, number) (2 + (ring) * 2 + (number)) /* a call: the epoch in which its client acts. 0: none */
#define DONE(ring) (6 + (ring))
#define GENERATION 8
#define EPOCH(engine) (9 + (engine))   /* of the door. 0: even. Else it is odd, for this epoch of the group */
#define INSIDE(engine) (11 + (engine)) /* of the door. 0: nobody. 1: a pair. 2: its gate has handed a call over, and has
                                        * ended. 3: its main kernel has begun */
#define VIEW(engine) (13 + (engine))   /* the epoch for which what operations use is mapped. 0: it is not */
#define WORDS 15
#define PROCESSES 3
#define DELAYED 2
#define OVERTAKE_ALL OVERTAKE(BELL(0)) OVERTAKE(BELL(1)) OVERTAKE(RING(0, 0)) OVERTAKE(RING(0, 1)) OVERTAKE(RING(1, 0))
#include "memory.pml"

byte tail[2];         /* calls made, by ring */
byte told = 1;        /* the epoch of which clients have been told */
byte running = 1;     /* the same, until a break begins. Then 0 */
bit dead;             /* the first engine */
bit cut_off;          /* its kernels */
bit opened[2];        /* lanes */
bit busy[2];          /* a pair of this engine runs */
byte next[4];         /* by engine and ring: the call that the lane takes next */
bit ran[4], ended[4]; /* by ring and number */

#define NEXT(ring) next[engine * 2 + (ring)]
#define CALL(ring) (NEXT(ring) < 2 -> memory[RING(ring, NEXT(ring))] : 0)

/* A stream calls by a kernel, the host by a copy and a memory operation, which fences too. */
proctype Caller(byte me; byte ring) {
  byte number, epoch;
  atomic { number = tail[ring]; tail[ring]++; epoch = told }
#ifdef MUTANT_BELL_FIRST
  relaxed(me, BELL(ring), 1);
  fence(me);
  relaxed(me, RING(ring, number), epoch)
#else
  relaxed(me, RING(ring, number), epoch);
#ifndef MUTANT_NO_CALLER_FENCE
  fence(me);
#endif
  relaxed(me, BELL(ring), 1)
#endif
}

/* ---- a pair. The order of its stores does not matter here, so they reach memory at once. */

inline end(ring) {
  assert(!ended[ring * 2 + NEXT(ring)] && (engine == 1 || !opened[1]));
  ended[ring * 2 + NEXT(ring)] = 1;
  NEXT(ring)++;
  memory[DONE(ring)] = NEXT(ring)
}

/* Takes the call that the gate has seen in the ring, or discards it. */
inline take(ring) {
  if
  :: seen[ring] != 0 && seen[ring] == epoch -> taken = 1 + ring
  :: seen[ring] != 0 && seen[ring] != epoch ->
     assert(seen[ring] != running);
     end(ring)
  :: else
  fi
}

#define ALL_ACCESSED (7 + 8 * DEATHS)

/* The gate's first accesses come in any order. One clears both halves of the bell, and one sets `inside` and reads the
 * epoch.
 */
inline enter() {
  do
  :: !(accessed & 1) ->
#ifdef MUTANT_EPOCH_BEFORE_INSIDE
     epoch = memory[EPOCH(engine)];
     atomic { memory[INSIDE(engine)] = 1; accessed = accessed | 1 }
#else
     atomic { memory[INSIDE(engine)] = 1; epoch = memory[EPOCH(engine)]; accessed = accessed | 1 }
#endif
  :: !(accessed & 2) ->
     atomic {
#ifndef MUTANT_BELL_CLEARED_LAST
       memory[BELL(0)] = 0; memory[BELL(1)] = 0;
#endif
       accessed = accessed | 2
     }
  :: !(accessed & 4) -> atomic { seen[0] = CALL(0); seen[1] = CALL(1); accessed = accessed | 4 }
#if DEATHS
  :: !(accessed & 8) -> atomic { generation = memory[GENERATION]; accessed = accessed | 8 }
#endif
  :: accessed == ALL_ACCESSED -> break
  od
}

#ifdef LINGERS
#define LINGER(when)                                                      \
  :: when && memory[EPOCH(engine)] != 0 && memory[GENERATION] == engine -> \
     atomic { lingers = 1; accessed = 0; taken = 0; goto look }
#else
#define LINGER(when)
#endif

#if defined(MUTANT_GATE_LOOKS_ONCE)
#define LAST_LOOK taken
#elif defined(MUTANT_MAIN_DOES_NOT_LOOK)
#define LAST_LOOK !taken
#else
#define LAST_LOOK true
#endif

proctype Pairs(byte engine) {
  byte accessed, epoch, taken;
  byte generation = engine;
  byte seen[2];
  byte left = LEFT;
  bit lingers, begins;
  do
  :: atomic {
       opened[engine] && left > 0 && (memory[BELL(0)] || memory[BELL(1)]) ->
       busy[engine] = 1;
       left = left - (dead && engine == 0)
     }
look:
     enter();
     atomic {
#ifndef MUTANT_NO_GENERATION
       if
       :: generation != engine ->
#ifndef MUTANT_NOT_SET_AGAIN
          memory[BELL(0)] = 1;
#endif
          goto leave
       :: else
       fi;
#endif
       take(BY_STREAMS);
       if
       :: !taken -> take(BY_HOST)
       :: else
       fi
     }
     if
     :: taken ->
        if
        :: lingers
        :: !lingers -> memory[INSIDE(engine)] = 2
        fi;
        /* The main kernel may begin much later. */
#ifdef MUTANT_BEGUN_BEHIND_EPOCH
        begins = (memory[EPOCH(engine)] == epoch);
        memory[INSIDE(engine)] = 3;
#else
        atomic { memory[INSIDE(engine)] = 3; begins = (memory[EPOCH(engine)] == epoch) }
#endif
#ifdef MUTANT_MAIN_DOES_NOT_ASK
        begins = true;
#endif
        if
        :: begins ->
           atomic {
             assert(memory[VIEW(engine)] == epoch && !ran[(taken - 1) * 2 + NEXT(taken - 1)]);
             ran[(taken - 1) * 2 + NEXT(taken - 1)] = 1
           }
           atomic { assert(memory[VIEW(engine)] == epoch); end((taken - 1)) }
        :: else -> atomic { assert(epoch != running); end((taken - 1)) }
        fi;
        if
        LINGER(true)
        :: !lingers
        :: lingers -> goto end_lingering
        fi
     :: !taken && lingers ->
        if /* the rings or the bell show a call, or the time is up */
        LINGER(CALL(0) || CALL(1) || memory[BELL(0)] || memory[BELL(1)])
        :: goto end_lingering
        fi
     :: else
     fi;
     atomic {
       if
       :: LAST_LOOK && (CALL(0) || CALL(1)) -> memory[BELL(0)] = 1
       :: else
       fi
     }
     goto leave;
end_lingering:
#ifndef MUTANT_LEAVES_SILENTLY
     memory[BELL(0)] = 1;
#endif
leave:
     atomic {
#ifdef MUTANT_BELL_CLEARED_LAST
       memory[BELL(0)] = 0; memory[BELL(1)] = 0;
#endif
       memory[INSIDE(engine)] = 0;
       accessed = 0; epoch = 0; generation = engine; taken = 0; seen[0] = 0; seen[1] = 0; lingers = 0; begins = 0;
       busy[engine] = 0
     }
  od unless { engine == 0 && cut_off }
}

/* ---- the engine's processor. Its memory operations go by one stream, in their order. */

/* The successor of a dead engine opens its lane. A pair that may have read the old generation has ended by then, or
 * was cut off, because the supervisor starts an engine when its predecessor's process is gone.
 */
inline open() {
#ifndef MUTANT_DONE_BEFORE_GENERATION
  memory[GENERATION] = 1;
#endif
#ifndef MUTANT_OLD_PAIR_INSIDE
  !busy[0] || cut_off;
#endif
  atomic { next[2] = memory[DONE(0)]; next[3] = memory[DONE(1)] }
#ifdef MUTANT_DONE_BEFORE_GENERATION
  memory[GENERATION] = 1;
#endif
  opened[1] = 1;
#ifndef MUTANT_OPENED_SILENTLY
  memory[BELL(0)] = 1
#endif
}

#define NOTHING_RUNS (memory[INSIDE(engine)] == 0 || memory[INSIDE(engine)] == 2)

inline resume() {
  memory[VIEW(engine)] = epoch;
  memory[EPOCH(engine)] = epoch;
#ifndef MUTANT_TOLD_AT_ONCE
  NOTHING_RUNS;
#endif
  atomic { told = epoch; running = epoch }
}

inline halt() {
  running = 0;
#ifndef MUTANT_HALTED_BEFORE_EPOCH
  memory[EPOCH(engine)] = 0;
#endif
  NOTHING_RUNS;
#ifdef MUTANT_HALTED_BEFORE_EPOCH
  memory[EPOCH(engine)] = 0;
#endif
  memory[VIEW(engine)] = 0
}

proctype Engine(byte engine) {
  byte epoch = 1, halts;
  if
  :: engine == 1 -> dead; open(); epoch++; resume()
  :: else
  fi;
  do
  :: halts < HALTS -> halts++; halt(); epoch++; resume()
  :: else -> break
  od
}

#if DEATHS
/* A gate that is cut off later may have cleared the bell. The engine's own look at the rings is not modelled. */
active proctype Killer() {
  atomic { opened[0] -> dead = 1; running = 0 }
  atomic { !opened[1] -> cut_off = 1 }
}
#endif

active proctype Rest() {
  timeout -> assert(memory[DONE(BY_STREAMS)] == STREAMS && memory[DONE(BY_HOST)] == HOST)
}

init {
  atomic {
    memory[EPOCH(0)] = 1; memory[VIEW(0)] = 1; opened[0] = 1;
    run Pairs(0); run Memory(1); run Caller(1, BY_STREAMS);
#if STREAMS == 2
    run Memory(2); run Caller(2, BY_STREAMS);
#endif
#if HOST
    run Memory(0); run Caller(0, BY_HOST);
#endif
#if DEATHS
    run Pairs(1);
#endif
    run Engine(DEATHS)
  }
}
