/* A client of a host device and its engine: the ring of calls, their results, both doorbells, and the death of
 * the engine at any point (daemon/device/host_calls.cpp, client/src/call_medium.cpp, waits.cpp). The engine
 * takes a call as soon as it sees it, and the call ends at once. When an engine has died, its successor lets the
 * group break: it discards calls of the old epoch, and the board tells of the new one.
 * -DPORTER: with the porter, which passes on each ring.
 *
 * Never: everybody at rest while a call has neither ended nor been given up by the board; a call overwritten
 * before it was taken; a call discarded although its client was told of its epoch.
 *
 * -DMUTANT_... breaks one rule each; check.sh lists them.
 */
#ifndef CALLS
#define CALLS 3
#endif
#ifndef ENGINE_DEATHS
#define ENGINE_DEATHS 1
#endif
#define SLOTS 2 /* capacity of the ring */

/* A call's words are one here: each of them has its number. An epoch is below 4. */
#define WORD(number, epoch) (((number) + 1) * 4 + (epoch))
#define SLOT(number) ((number) % SLOTS)
#define RESULT(number) (SLOTS + (number)) /* 0: none, 1: carried out, 2: discarded */
#define ENDED (SLOTS + CALLS)
#define BOARD (ENDED + 1)
#define ENGINE_SLEEP (ENDED + 2)
#define CLIENT_SLEEP (ENDED + 3)
#define WORDS (ENDED + 4)
#define IS_THERE(number) (memory[SLOT(number)] / 4 == (number) + 1)

#define PROCESSES 2
#define CLIENT 0
#define ENGINE 1
#define OVERTAKE_ALL OVERTAKE(ENGINE_SLEEP) OVERTAKE(CLIENT_SLEEP)
#include "memory.pml"

bit engine_bell, client_bell;
bit engine_dies;

#ifdef MUTANT_EMPTIED_AFTER_PASSING_ON
#define PORTER
#endif
#ifdef PORTER
bit engine_rung, ring_wanted; /* as the porter has them */
bit porter_dies;
#define ENGINE_RUNG engine_rung
#define RING_WANTED ring_wanted
#else
#define ENGINE_RUNG engine_bell
#define RING_WANTED client_bell
#endif

byte made, done;      /* calls; those whose end the client knows */
byte epoch_of[CALLS]; /* in which they were made */
byte taken;           /* calls below were taken by some engine */

/* --- client --- */

inline ring_engine() {
  atomic {
    if
    :: memory[ENGINE_SLEEP] != 0 -> ENGINE_RUNG = 1
    :: else
    fi
  }
}

inline call() {
#ifdef MUTANT_RING_BEFORE_CALL
  ring_engine();
#endif
  atomic {
    assert(made < taken + SLOTS);
    epoch_of[made] = own;
    release(CLIENT, SLOT(made), WORD(made, own));
    made++
  }
#ifndef MUTANT_RING_BEFORE_CALL
#ifndef MUTANT_NO_RINGER_FENCE
  fence(CLIENT);
#endif
  ring_engine()
#endif
}

/* The oldest call has been carried out, or the board says that its epoch has ended. */
#define KNOWN (done < made && (memory[RESULT(done)] == 1 || memory[BOARD] > epoch_of[done]))

active proctype Client() {
  byte own;
  do
  :: made < CALLS && made - memory[ENDED] < SLOTS -> call()
  :: atomic { KNOWN -> done++ }
  :: atomic { done == made && memory[BOARD] > own -> own = memory[BOARD] } /* it resumes */
  :: atomic { done < made && !KNOWN } ->
     relaxed(CLIENT, CLIENT_SLEEP, 1);
#ifndef MUTANT_NO_CLIENT_FENCE
     fence(CLIENT);
#endif
     if
#ifndef MUTANT_NO_CLIENT_LOOK
     :: KNOWN
#endif
     :: else -> atomic { client_bell -> client_bell = 0 }
     fi;
     relaxed(CLIENT, CLIENT_SLEEP, 0)
  :: done == CALLS -> break
  od
}

/* --- engine --- */

inline ring_client() {
#ifndef MUTANT_NO_ENGINE_FENCE
  fence(ENGINE);
#endif
  atomic {
    if
    :: memory[CLIENT_SLEEP] != 0 -> RING_WANTED = 1
    :: else
    fi
  }
}

inline take() {
  atomic {
    its = memory[SLOT(next)] % 4;
    assert(its != lives || its == runs); /* its client was told of this epoch */
    taken = (next + 1 > taken -> next + 1 : taken);
    release(ENGINE, RESULT(next), (its == runs -> 1 : 2));
    its = 0
  }
  atomic { next++; release(ENGINE, ENDED, next) }
  ring_client()
}

/* A successor: whatever stands in the ring is of an epoch that has ended. */
inline begin_epoch() {
#ifdef MUTANT_TOLD_BEFORE_TAKEN
  release(ENGINE, BOARD, lives);
  do
  :: IS_THERE(next) -> take()
  :: break
  od;
  runs = lives;
#else
  runs = lives;
  release(ENGINE, BOARD, lives);
#endif
#ifndef MUTANT_TOLD_SILENTLY
  ring_client()
#endif
}

inline sleep() {
  relaxed(ENGINE, ENGINE_SLEEP, 1);
#ifndef MUTANT_NO_SLEEPER_FENCE
  fence(ENGINE);
#endif
  if
#ifndef MUTANT_NO_LAST_LOOK
  :: IS_THERE(next)
#endif
  :: else -> atomic { engine_bell -> engine_bell = 0 }
  fi;
  relaxed(ENGINE, ENGINE_SLEEP, 0)
}

#define HALTED 255

proctype Engine() {
  byte next, its, runs, lives;
start:
  {
    next = memory[ENDED];
    relaxed(ENGINE, ENGINE_SLEEP, 0);
    if
    :: lives != 0 ->
       do /* halted: it may look at the ring before it is told of the new epoch */
       :: IS_THERE(next) -> take()
       :: break
       od;
       begin_epoch()
    :: else
    fi;
    do
    :: IS_THERE(next) -> take()
    :: else -> sleep()
    od
  } unless { engine_dies };
  d_step {
    engine_dies = 0;
#ifdef PORTER
    porter_dies = 1;
    ring_wanted = 0;
#endif
    next = 0; its = 0; runs = HALTED; lives++
  }
  (len(delayed[ENGINE]) == 0);
  goto start
}

/* --- the porter between them; here it dies with the engine, which loses more than the real one does --- */

#ifdef PORTER
inline pass_on(from, to) {
#ifdef MUTANT_EMPTIED_AFTER_PASSING_ON
  to = 1;
  from = 0
#else
  from = 0;
  to = 1
#endif
}

active proctype Porter() {
start:
  {
    do
    :: engine_rung -> pass_on(engine_rung, engine_bell)
    :: ring_wanted -> pass_on(ring_wanted, client_bell)
    od
  } unless { porter_dies };
  porter_dies = 0;
  goto start
}
#endif

active proctype Killer() {
  byte left = ENGINE_DEATHS;
  do
  :: left > 0 -> engine_dies = 1; left--; (!engine_dies)
  :: break
  od
}

active proctype Rest() {
  timeout -> assert(done == made) /* nobody can move: the end of every call is known */
}

init {
  atomic { run Memory(CLIENT); run Memory(ENGINE); run Engine() }
}
