/* A session: client and engine, both rings, both doorbells, the records of operations in flight, and the
 * death of the engine at any point (SessionPort, client/src/submit.cpp and completion.cpp). Operations end
 * as soon as they are taken, which fills the completion ring soonest.
 * -DPORTER: with the porter, which passes on each ring.
 *
 * Never: everybody at rest while a submitted operation is unanswered, an answer to what was not submitted,
 * more records than there are. A completion may come twice when the engine dies; the client drops the second.
 *
 * -DMUTANT_... breaks one rule each; check.sh lists them.
 */
#ifndef TICKETS
#define TICKETS 2
#endif
#ifndef ENGINE_DEATHS
#define ENGINE_DEATHS 1
#endif
#define SUBMISSIONS 2 /* capacity of the rings */
#ifndef COMPLETIONS
#define COMPLETIONS 1
#endif
#define RECORDS 2

/* A slot's sequence and payload are one word here: that they become visible together is what ring.pml shows. */
#define SLOT(position, ticket) (((position) + 1) * 8 + (ticket))
#define S_SLOT(position) ((position) % SUBMISSIONS)
#define C_SLOT(position) (2 + (position) % COMPLETIONS)
#define RECORD(i) (4 + (i))
#define S_HEAD 6
#define C_HEAD 7
#define C_TAIL 8
#define ENGINE_SLEEP 9
#define CLIENT_SLEEP 10
#define WORDS 11
#define IN(word, position) (memory[word] / 8 == (position) + 1)
#define TICKET_IN(word) (memory[word] % 8)

#define PROCESSES 2
#define CLIENT 0
#define ENGINE 1
#define OVERTAKE_ALL OVERTAKE(C_TAIL) OVERTAKE(ENGINE_SLEEP) OVERTAKE(CLIENT_SLEEP)
#include "memory.pml"

bit engine_bell, client_bell;
bit engine_dies;

#ifdef MUTANT_EMPTIED_AFTER_PASSING_ON
#define PORTER
#endif
#ifdef PORTER
bit engine_rung, ring_wanted; /* as the porter has them: the client has rung; the engine wants it rung */
bit porter_dies;
#define ENGINE_RUNG engine_rung
#define RING_WANTED ring_wanted
#else
#define ENGINE_RUNG engine_bell
#define RING_WANTED client_bell
#endif

byte submitted; /* tickets 1 .. submitted are in the ring, or were */
byte done;      /* how many of them have been answered */
bit answered[TICKETS + 1];

/* Steps that touch no shared word are put together with one that does. */

/* --- client --- */

inline push() {
  atomic {
    release(CLIENT, S_SLOT(submitted), SLOT(submitted, submitted + 1));
    submitted++
  }
  fence(CLIENT);
  atomic {
    if
    :: memory[ENGINE_SLEEP] != 0 -> ENGINE_RUNG = 1
    :: else
    fi
  }
}

/* Takes one completion, if there is one, and gives the slot back. */
inline drain_one() {
  atomic {
    any = IN(C_SLOT(head), head);
    if
    :: any ->
       ticket = TICKET_IN(C_SLOT(head));
       assert(ticket >= 1 && ticket <= submitted);
       done = (answered[ticket] -> done : done + 1);
       answered[ticket] = 1;
       ticket = 0;
       head++
    :: else
    fi
  }
  if
  :: any ->
     release(CLIENT, C_HEAD, head);
#ifndef MUTANT_NO_ROOM_BELL
     fence(CLIENT);
     atomic {
       if
       :: memory[ENGINE_SLEEP] == 2 -> ENGINE_RUNG = 1
       :: else
       fi
     }
#endif
  :: else
  fi
}

active proctype Client() {
  byte head, ticket;
  bit any;
  do
  :: submitted < TICKETS && submitted - memory[S_HEAD] < SUBMISSIONS -> push()
  :: done < submitted && IN(C_SLOT(head), head) -> drain_one()
  :: done < submitted ->
     relaxed(CLIENT, CLIENT_SLEEP, 1);
     fence(CLIENT);
     drain_one();
     if
     :: any
     :: else -> atomic { client_bell -> client_bell = 0 }
     fi;
     relaxed(CLIENT, CLIENT_SLEEP, 0)
  :: done == submitted -> break
  od
}

/* --- engine --- */

#define ROOM (tail - memory[C_HEAD] < COMPLETIONS)

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

inline forget(which) {
  atomic {
    i = (mine[0] == which -> 0 : 1);
    if
    :: mine[i] == which -> mine[i] = 0; inflight--; release(ENGINE, RECORD(i), 0)
    :: else
    fi;
    i = 0
  }
}

/* SessionPort::post where there is room. */
inline post(which) {
#ifdef MUTANT_FORGET_BEFORE_POST
  forget(which);
#endif
  atomic { release(ENGINE, C_SLOT(tail), SLOT(tail, which)); tail++ }
  relaxed(ENGINE, C_TAIL, tail);
#ifndef MUTANT_FORGET_BEFORE_POST
  forget(which)
#endif
}

inline complete(which) {
  if
  :: atomic { len(waiting) == 0 && ROOM } -> post(which); ring_client()
  :: atomic { else -> waiting ! which }
  fi
}

inline adopt() {
  atomic { head = memory[S_HEAD]; given_back = head; tail = memory[C_TAIL] }
  atomic {
    if
#ifndef MUTANT_TAIL_NOT_ADOPTED
    :: IN(C_SLOT(tail), tail) -> tail++; relaxed(ENGINE, C_TAIL, tail)
#endif
    :: else
    fi
  }
  atomic {
    mine[0] = memory[RECORD(0)];
    mine[1] = memory[RECORD(1)];
    orphans[0] = mine[0];
    orphans[1] = mine[1];
    inflight = (mine[0] != 0) + (mine[1] != 0);
    relaxed(ENGINE, ENGINE_SLEEP, 0)
  }
  atomic { /* recorded, but its slot was not given back */
    if
    :: IN(S_SLOT(head), head) && (orphans[0] == TICKET_IN(S_SLOT(head)) || orphans[1] == TICKET_IN(S_SLOT(head))) ->
       head++; given_back = head; release(ENGINE, S_HEAD, head)
    :: else
    fi
  }
#ifndef MUTANT_ADOPTS_SILENTLY
  ring_client() /* the former engine may have died between publishing and ringing */
#endif
}

inline flush() {
  do
  :: atomic { len(waiting) > 0 && ROOM -> waiting ? ticket; progress = 1 } post(ticket); ticket = 0
  :: else -> break
  od;
  if
  :: progress -> ring_client()
  :: else
  fi
}

inline give_back() {
  atomic {
    if
    :: head != given_back -> given_back = head; release(ENGINE, S_HEAD, head)
    :: else
    fi
  }
}

inline begin() {
  atomic {
    i = (mine[0] == 0 -> 0 : 1);
    assert(mine[i] == 0);
    mine[i] = ticket;
    inflight++;
    release(ENGINE, RECORD(i), ticket);
    i = 0
  }
}

inline take() {
  if
  :: atomic { len(waiting) == 0 && inflight < RECORDS } ->
     give_back();
     if
     :: atomic {
          IN(S_SLOT(head), head) ->
          ticket = TICKET_IN(S_SLOT(head));
          head++;
          progress = 1
        }
#ifdef MUTANT_SLOT_BACK_BEFORE_RECORD
        give_back();
#endif
        begin();
        give_back();
        if
        :: complete(ticket)
        :: running ! ticket
        fi;
        ticket = 0
     :: else
     fi
  :: else
  fi
}

/* When kResume has come, or a second has passed: at any time, but it does come. */
inline answer_orphans() {
  do
  :: atomic { orphans[0] != 0 -> ticket = orphans[0]; orphans[0] = 0 } complete(ticket); ticket = 0
  :: atomic { orphans[0] == 0 && orphans[1] != 0 -> ticket = orphans[1]; orphans[1] = 0 } complete(ticket); ticket = 0
  :: else -> break
  od
}

#define PENDING (len(waiting) == 0 && inflight < RECORDS && IN(S_SLOT(head), head))
#ifdef MUTANT_ROOM_NOT_LOOKED_FOR
#define ROOM_AGAIN false
#else
#define ROOM_AGAIN (len(waiting) > 0 && ROOM)
#endif

#define ASLEEP (len(waiting) > 0 -> 2 : 1) /* 2: wants to hear of room as well */

inline sleep() {
  relaxed(ENGINE, ENGINE_SLEEP, ASLEEP);
  fence(ENGINE);
  if
  :: PENDING || ROOM_AGAIN
  :: else -> atomic { engine_bell -> engine_bell = 0 }
  fi;
  relaxed(ENGINE, ENGINE_SLEEP, 0)
}

chan running = [RECORDS] of { byte }; /* taken and not finished; the engine's own memory, as the next */
chan waiting = [RECORDS] of { byte }; /* completions that found no room */

proctype Engine() {
  byte head, given_back, tail, ticket, inflight, i;
  byte mine[RECORDS], orphans[RECORDS];
  bit progress;
start:
  {
    adopt();
    do
    :: flush();
       take();
       if
       :: orphans[0] != 0 || orphans[1] != 0 ->
          progress = 1;
          if
          :: answer_orphans()
          :: skip /* not yet */
          fi
       :: else
       fi;
       if
       :: len(running) > 0 ->
          progress = 1;
          if
          :: running ? ticket; complete(ticket); ticket = 0
          :: skip /* not yet */
          fi
       :: else
       fi;
       if
       :: progress -> progress = 0
       :: else -> sleep()
       fi
    od
  } unless { engine_dies };
  d_step {
    engine_dies = 0;
#ifdef PORTER
    porter_dies = 1;
    ring_wanted = 0;
#endif
    do
    :: len(waiting) > 0 -> waiting ? ticket
    :: len(running) > 0 -> running ? ticket
    :: else -> break
    od;
    head = 0; given_back = 0; tail = 0; ticket = 0; inflight = 0; i = 0; progress = 0;
    mine[0] = 0; mine[1] = 0; orphans[0] = 0; orphans[1] = 0
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
  timeout -> assert(done == submitted) /* nobody can move: everything submitted was answered */
}

init {
  atomic { run Memory(CLIENT); run Memory(ENGINE); run Engine() }
}
