/* Two ranks of a group on one device, each with a bell and pairs as in bell.pml. A main kernel that waits for a rank
 * whose client has yet to call could keep the device from that client. So a gate tells that its rank has called,
 * and takes the call only if both ranks have. It then sets the other rank's bell. Else it leaves the call in the ring
 * and its own bell clear.
 *
 * Never: both sleep while both have called; a main kernel begins before both have called.
 */
#ifndef OPS
#define OPS 2
#endif

#define BELL(rank) (rank)
#define CALL(rank) (2 + (rank))   /* the number of the rank's last call. Its stream waits for the end of each */
#define CALLED(rank) (4 + (rank)) /* the number of the last call that its gate has told of */
#define BEGUN(rank) (6 + (rank))  /* by main kernels, which wait for each other */
#define DONE(rank) (8 + (rank))
#define WORDS 10
#define PROCESSES 4
#define OVERTAKE_ALL OVERTAKE(BELL(0)) OVERTAKE(BELL(1)) OVERTAKE(CALL(0)) OVERTAKE(CALL(1)) \
                     OVERTAKE(CALLED(0)) OVERTAKE(CALLED(1))
#include "memory.pml"

byte calls[2]; /* made, by rank */
byte finished; /* streams */

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

proctype Pairs(byte me; byte rank) {
  byte next = 1;
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
     relaxed(me, CALLED(rank), next);
#ifndef MUTANT_NO_SEQUENTIAL_FENCE
     fence(me);
#endif
#ifndef MUTANT_BEGINS_ALONE
     if
     :: memory[CALLED(1 - rank)] < next ->
#ifdef MUTANT_BELL_CLEARED_LAST
        memory[BELL(rank)] = 0;
#endif
        goto leave
     :: else
     fi;
#endif
#ifndef MUTANT_OTHER_NOT_TOLD
     relaxed(me, BELL(1 - rank), 1);
#endif
     assert(calls[1 - rank] >= next);
     release(me, BEGUN(rank), next);
     memory[BEGUN(1 - rank)] >= next;
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
  timeout -> assert(finished == 2)
}

init {
  atomic {
    run Memory(0); run Memory(1); run Memory(2); run Memory(3);
    run Stream(0, 0); run Stream(1, 1); run Pairs(2, 0); run Pairs(3, 1)
  }
}
