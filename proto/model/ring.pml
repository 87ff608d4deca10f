/* One ring, its producer and its consumer, who sleeps when there is nothing: ring_push and ring_peek
 * (proto/ring.h), the doorbell (README.md, "Doorbells"). Either side dies at any point; a successor of the
 * consumer goes on from the index in shared memory, as SessionPort::adopt does.
 *
 * Never: a slot read before it is published or overwritten before it is read, positions out of order,
 * everybody at rest while something is published that the consumer has not seen.
 *
 * -DMUTANT_... breaks one rule each; check.sh lists them.
 */
#define CAPACITY 2
#ifndef MESSAGES
#define MESSAGES 4
#endif
#ifndef CONSUMER_DEATHS
#define CONSUMER_DEATHS 1
#endif

#define PAYLOAD(position) ((position) % CAPACITY)
#define SEQUENCE(position) (CAPACITY + (position) % CAPACITY)
#define HEAD (2 * CAPACITY)
#define SLEEPING (2 * CAPACITY + 1)
#define WORDS (2 * CAPACITY + 2)

#define PROCESSES 2
#define PRODUCER 0
#define CONSUMER 1
#define OVERTAKE_ALL OVERTAKE(0) OVERTAKE(1) OVERTAKE(SLEEPING)
#ifdef MUTANT_RELAXED_SEQUENCE
#undef OVERTAKE_ALL
#define OVERTAKE_ALL OVERTAKE(0) OVERTAKE(1) OVERTAKE(2) OVERTAKE(3) OVERTAKE(SLEEPING)
#endif
#include "memory.pml"

bit bell;           /* a byte lies in the doorbell's socket; more make no difference */
bit news;           /* the supervisor has told the consumer that the producer is gone */
bit producer_dies, consumer_dies;
bit producer_gone;

/* What has happened, for the assertions only. */
byte published; /* release store of the sequence issued */
byte copied;    /* positions below have been read by some consumer */

inline ring_if_sleeping() {
  if
  :: memory[SLEEPING] == 1 -> bell = 1
  :: memory[SLEEPING] == 0 -> skip
  fi
}

inline write_payload() {
  atomic {
    assert(copied + CAPACITY > tail); /* nothing unread is overwritten */
    relaxed(PRODUCER, PAYLOAD(tail), tail + 1)
  }
}

inline write_sequence() {
  atomic {
#ifdef MUTANT_RELAXED_SEQUENCE
    relaxed(PRODUCER, SEQUENCE(tail), tail + 1);
#else
    release(PRODUCER, SEQUENCE(tail), tail + 1);
#endif
    published++
  }
}

active proctype Producer() {
  byte tail;
  {
    do
    :: tail < MESSAGES ->
       (tail - memory[HEAD] < CAPACITY); /* a full ring: the caller tries again */
#ifdef MUTANT_RING_BEFORE_PUBLISH
       ring_if_sleeping();
#endif
#ifdef MUTANT_SEQUENCE_FIRST
       write_sequence();
       write_payload();
#else
       write_payload();
       write_sequence();
#endif
       tail++;
#ifndef MUTANT_RING_BEFORE_PUBLISH
#ifndef MUTANT_NO_RINGER_FENCE
       fence(PRODUCER);
#endif
       ring_if_sleeping()
#endif
    :: break /* has nothing more to say */
    od
  } unless { producer_dies };
  producer_gone = 1
}

/* What a process has stored reaches memory even if it dies; its end becomes known after that. */
active proctype Supervisor() {
  if
  :: producer_dies = 1;
     (producer_gone && len(delayed[PRODUCER]) == 0) -> news = 1
  :: skip
  fi
}

inline look(position, found) { found = (memory[SEQUENCE(position)] == position + 1) }

inline read_slot() {
  atomic {
    copy = memory[PAYLOAD(head)];
    assert(copy == head + 1);                      /* what was published there, whole */
    assert(head == copied || head + 1 == copied);  /* in order; the last one again after a restart */
    copied = (head == copied -> copied + 1 : copied);
    copy = 0
  }
}

inline consume() {
#ifdef MUTANT_HEAD_BEFORE_COPY
  release(CONSUMER, HEAD, head + 1);
  read_slot();
#else
  read_slot();
  release(CONSUMER, HEAD, head + 1);
#endif
  head++
}

inline sleep() {
  relaxed(CONSUMER, SLEEPING, 1);
#ifndef MUTANT_NO_SLEEPER_FENCE
  fence(CONSUMER);
#endif
#ifndef MUTANT_NO_LAST_LOOK
  look(head, found);
#endif
  if
  :: found -> relaxed(CONSUMER, SLEEPING, 0)
  :: else ->
#ifdef MUTANT_BELL_EMPTIED_AFTER_LOOK
     bell = 0;
#endif
     if
     :: bell -> skip
     :: news -> news = 0
     fi;
     relaxed(CONSUMER, SLEEPING, 0);
     bell = 0
  fi;
  found = 0
}

proctype Consumer() {
  byte head, copy, early;
  bit found;
start:
  {
    head = memory[HEAD];
    relaxed(CONSUMER, SLEEPING, 0);
    do
    :: 
#ifdef MUTANT_NO_ACQUIRE
       early = memory[PAYLOAD(head)]; /* the load of the payload overtakes that of the sequence */
#endif
       look(head, found);
       if
       :: found ->
          found = 0;
#ifdef MUTANT_NO_ACQUIRE
          assert(early == head + 1);
          early = 0;
#endif
          consume()
       :: else -> early = 0; sleep()
       fi
    od
  } unless { consumer_dies };
  d_step { consumer_dies = 0; head = 0; copy = 0; found = 0; early = 0 };
  (len(delayed[CONSUMER]) == 0);
  goto start
}

active proctype Killer() {
  byte left = CONSUMER_DEATHS;
  do
  :: left > 0 -> consumer_dies = 1; left--; (!consumer_dies)
  :: break
  od
}

active proctype Rest() {
  timeout -> assert(copied == published) /* nobody can move: everything published was seen */
}

init {
  atomic { run Memory(PRODUCER); run Memory(CONSUMER); run Consumer() }
}
