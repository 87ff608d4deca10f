/* Engines of a group wait for each other: each announces an operation to all, rings those that sleep, and goes
 * on when all have announced it; then the same again for "arrived" (Operation::announce and move,
 * Group::ring_peers, Engine::sleep). One fence stands for several stores and several flags on either side.
 *
 * Never: everybody at rest before all have seen all.
 */
#define ENGINES 3
#ifndef ROUNDS
#define ROUNDS 2
#endif

#define TAG(at, from) ((at) * ENGINES + (from)) /* in the block of engine `at` */
#define SLEEPING(engine) (ENGINES * ENGINES + (engine))
#define WORDS (ENGINES * ENGINES + ENGINES)
#define PROCESSES ENGINES
#define DELAYED (ENGINES + 1)
#define OVERTAKE_ALL OVERTAKE(SLEEPING(0)) OVERTAKE(SLEEPING(1)) OVERTAKE(SLEEPING(2))
#include "memory.pml"

bit bell[ENGINES]; /* an eventfd: readable or not */
byte finished;

#define ALL_ARE_THERE \
  (memory[TAG(me, 0)] >= round && memory[TAG(me, 1)] >= round && memory[TAG(me, 2)] >= round)

proctype Engine(byte me) {
  byte round = 1, peer;
  do
  :: round <= ROUNDS ->
     release(me, TAG(0, me), round);
     release(me, TAG(1, me), round);
     release(me, TAG(2, me), round);
#ifndef MUTANT_NO_RINGER_FENCE
     fence(me);
#endif
     do
     :: peer < ENGINES ->
        atomic {
          if
          :: memory[SLEEPING(peer)] != 0 -> bell[peer] = 1
          :: else
          fi;
          peer++
        }
     :: else -> peer = 0; break
     od;
     do
     :: ALL_ARE_THERE -> break
     :: !ALL_ARE_THERE ->
        relaxed(me, SLEEPING(me), 1);
#ifndef MUTANT_NO_SLEEPER_FENCE
        fence(me);
#endif
        if
        :: ALL_ARE_THERE
        :: else -> atomic { bell[me] -> bell[me] = 0 }
        fi;
        relaxed(me, SLEEPING(me), 0)
     od;
     round++
  :: else -> break
  od;
  finished++
}

active proctype Rest() {
  timeout -> assert(finished == ENGINES)
}

init {
  atomic {
    run Memory(0); run Memory(1); run Memory(2);
    run Engine(0); run Engine(1); run Engine(2)
  }
}
