/* A stream asks for operations by itself (proto/call_words.h, client/src/stream_words.h,
 * kernels/cuda/workers/ends.h, CudaDevice::close_calls). The engine may be gone at any step; whoever closes the
 * ring then, does so when nothing of the engine's kernel runs any more.
 *
 * Each call is awaited by kernel (`done` or `closed`) or by stream memory operation (its flag).
 *
 * Never: an input or an output that is not there; a stream that waits for ever.
 */
#ifndef CALLS
#define CALLS 3
#endif

#define INPUT 0
#define OUTPUT 1
#define FLAG 2
#define CLOSED 3
#define DONE 4
#define RING(number) (5 + (number) % 2)
#define WORDS 7
#define PROCESSES 3
#define OVERTAKE_ALL OVERTAKE(INPUT) OVERTAKE(OUTPUT) OVERTAKE(FLAG) OVERTAKE(DONE) OVERTAKE(RING(0)) OVERTAKE(RING(1))
#include "memory.pml"

#define CARRIED_OUT 2 /* in place of 1: the engine has set the flag, not the closer */

bit gone;     /* the engine's kernel */
bit finished; /* the stream */

#define WORD(number, flagged) ((number) * 2 + (flagged))
#define IS_THERE (memory[RING(next)] / 2 == next)

proctype Stream(byte me) {
  byte number = 1, seen;
  bit flagged;
  do
  :: number <= CALLS ->
     if
     :: flagged = 0
     :: flagged = 1
     fi;
     relaxed(me, INPUT, number);
     if
     :: flagged ->
#ifndef MUTANT_CLEARED_AFTER_RING
        relaxed(me, FLAG, 0);
#endif
#ifndef MUTANT_NO_RINGER_FENCE
        fence(me)
#endif
     :: else ->
#ifdef MUTANT_RELAXED_RING
        skip
#else
        fence(me)
#endif
     fi;
     if
     :: memory[CLOSED] != 0 -> relaxed(me, FLAG, 1)
     :: else -> relaxed(me, RING(number), WORD(number, flagged))
     fi;
#ifdef MUTANT_CLEARED_AFTER_RING
     if
     :: flagged -> relaxed(me, FLAG, 0)
     :: else
     fi;
#endif
     if
     :: flagged ->
        fence(me); /* the kernel that rang has ended */
        atomic { memory[FLAG] != 0 -> seen = (memory[FLAG] == CARRIED_OUT -> 1 : 0) }
     :: else ->
#ifdef MUTANT_CLOSED_NOT_LOOKED_FOR
        atomic { memory[DONE] >= number -> seen = 1 }
#else
        atomic {
          (memory[DONE] >= number || memory[CLOSED] != 0) -> seen = (memory[DONE] >= number -> 1 : 0)
        }
#endif
     fi;
     assert(!seen || memory[OUTPUT] >= number || memory[CLOSED] != 0);
     fence(me); /* the stream's next kernel */
     seen = 0;
     number++
  :: else -> break
  od;
  finished = 1
}

proctype Kernel(byte me) {
  byte next = 1;
  bit flagged;
  do
  :: next <= CALLS ->
     if
     :: IS_THERE -> flagged = memory[RING(next)] % 2
     :: gone = 1; goto over /* its process dies, or its rank is let go */
     fi;
     assert(memory[INPUT] >= next);
     relaxed(me, OUTPUT, next);
     if
     :: flagged -> release(me, FLAG, CARRIED_OUT)
     :: else
     fi;
     if
     :: skip
     :: gone = 1; goto over
     fi;
#ifdef MUTANT_RELAXED_DONE
     relaxed(me, DONE, next);
#else
     release(me, DONE, next);
#endif
     next++
  :: else -> gone = 1; break
  od;
over:
  skip
}

/* The engine when it lets the rank go, or the library when the daemon is lost. */
proctype Closer(byte me) {
  gone;
#ifdef MUTANT_FLAGS_FIRST
  release(me, FLAG, 1);
  release(me, CLOSED, 1)
#else
  release(me, CLOSED, 1);
  release(me, FLAG, 1)
#endif
}

active proctype Rest() {
  timeout -> assert(finished)
}

init {
  atomic {
    run Memory(0); run Memory(1); run Memory(2);
    run Stream(0); run Kernel(1); run Closer(2)
  }
}
