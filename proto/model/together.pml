/* Ranks of a group, each with a bell and pairs as in bell.pml. A rank that waits takes a call only if all ranks have
 * called. So while a client has yet to call, no main kernel waits for it: it could keep the client from a shared
 * device, and it would hold SMs meanwhile. Other ranks begin at once. Each gate tells once for each call that its rank
 * has called: one that waits before it looks, others while their main kernel runs. Who finds then that all have told
 * sets the bells of those that wait. A gate that may not begin leaves the call in the ring and its own bell clear.
 *
 * -DWAITING=n: the set of ranks that wait. Never: all sleep while all have called; a rank that waits begins before all
 * have called.
 */
#ifndef OPS
#define OPS 2
#endif
#ifndef RANKS
#define RANKS 2
#endif
#ifdef MUTANT_BEGUN_NOT_TOLD
#define WAITING 1
#endif
#ifndef WAITING
#define WAITING 7
#endif
#define WAITS(rank) ((WAITING >> (rank)) & 1)

#define BELL(rank) (rank)
#define CALL(rank) (RANKS + (rank))       /* the number of the rank's last call. Its stream waits for the end of each */
#define CALLED(rank) (2 * RANKS + (rank)) /* the number of the last call that its gate has told of */
#define BEGUN(rank) (3 * RANKS + (rank))  /* by main kernels, which wait for each other */
#define DONE(rank) (4 * RANKS + (rank))
#define WORDS (5 * RANKS)
#define PROCESSES (2 * RANKS)
#if RANKS == 3
#define DELAYED 3
#define THIRD OVERTAKE(BELL(2)) OVERTAKE(CALL(2)) OVERTAKE(CALLED(2))
#else
#define THIRD
#endif
#define OVERTAKE_ALL OVERTAKE(BELL(0)) OVERTAKE(BELL(1)) OVERTAKE(CALL(0)) OVERTAKE(CALL(1)) \
                     OVERTAKE(CALLED(0)) OVERTAKE(CALLED(1)) THIRD
#include "memory.pml"

byte calls[RANKS]; /* made, by rank */
byte finished;     /* streams */

proctype Stream(byte me; byte rank) {
  do
  :: calls[rank] < OPS ->
     calls[rank]++;
     relaxed(me, CALL(rank), calls[rank]);
     fence(me);
     relaxed(me, BELL(rank), 1);
     memory[DONE(rank)] == calls[rank]
  :: else -> break
  od;
  finished++
}

/* Whether all others have this word at `next`. Own words are not loaded. */
#if RANKS == 3
#define ALL_OTHERS(WORD) (memory[WORD((rank + 1) % 3)] >= next && memory[WORD((rank + 2) % 3)] >= next)
#else
#define ALL_OTHERS(WORD) (memory[WORD(1 - rank)] >= next)
#endif

inline set_bell(other) {
  if
  :: WAITS(other) -> relaxed(me, BELL(other), 1)
  :: else
  fi
}

inline tell() {
  relaxed(me, CALLED(rank), next);
#ifndef MUTANT_NO_SEQUENTIAL_FENCE
  fence(me);
#endif
#ifndef MUTANT_OTHERS_NOT_RUNG
  if
  :: ALL_OTHERS(CALLED) ->
     set_bell((rank + 1) % RANKS);
#if RANKS == 3
     set_bell((rank + 2) % RANKS)
#endif
  :: else
  fi
#endif
}

proctype Pairs(byte me; byte rank) {
  byte next = 1, told;
  bit seen;
  do
  :: memory[BELL(rank)] != 0 ->
     if /* in any order */
     :: seen = (memory[CALL(rank)] == next); memory[BELL(rank)] = 0
     :: memory[BELL(rank)] = 0; seen = (memory[CALL(rank)] == next)
     fi;
     if
     :: !seen -> goto look
     :: else
     fi;
     if
     :: WAITS(rank) ->
#ifdef MUTANT_TELLS_LATE
        if
        :: !ALL_OTHERS(CALLED) -> goto leave
        :: else
        fi;
#endif
        if
        :: told < next -> told = next; tell()
        :: else
        fi;
#ifndef MUTANT_BEGINS_ALONE
        if
        :: !ALL_OTHERS(CALLED) ->
#ifdef MUTANT_BELL_CLEARED_LAST
           memory[BELL(rank)] = 0;
#endif
           goto leave
        :: else
        fi;
#endif
        assert(calls[(rank + 1) % RANKS] >= next && calls[(rank + RANKS - 1) % RANKS] >= next)
     :: else
     fi;
     release(me, BEGUN(rank), next);
#ifndef MUTANT_BEGUN_NOT_TOLD
     if
     :: !WAITS(rank) -> tell()
     :: else
     fi;
#endif
     ALL_OTHERS(BEGUN);
     release(me, DONE(rank), next);
     next++;
look:
     fence(me);
     if
     :: memory[CALL(rank)] == next -> relaxed(me, BELL(rank), 1)
     :: else
     fi;
leave:
     fence(me) /* a kernel begins when that before it in its stream has ended */
  od
}

active proctype Rest() {
  timeout -> assert(finished == RANKS)
}

init {
  atomic {
    run Memory(0); run Memory(1); run Memory(2); run Memory(3);
    run Stream(0, 0); run Stream(1, 1); run Pairs(RANKS, 0); run Pairs(RANKS + 1, 1);
#if RANKS == 3
    run Memory(4); run Memory(5); run Stream(2, 2); run Pairs(RANKS + 2, 2)
#endif
  }
}
