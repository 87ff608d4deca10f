/* Operations between two nodes of two ranks: what gateways pass on, windows and credits, and a break: daemon/far,
 * HostCrossing, FarSide. Messages arrive in any order, each once. GATEWAY(s) is the rank of the other node that
 * does there what s would do, as part of its own operation of the same number.
 *
 * The operations are a dispatch and then a combine (-DDISPATCHES: two dispatches). A rank has up to DEPTH in
 * flight. Clients of ranks 0 and 1 submit at once, those of 2 and 3 (-DPATIENT: all) when the
 * operation before has ended.
 *
 * dispatch  announced to near ranks by stores, to the gateway by a message, which says how many batches there
 *           will be. The gateway stores it for all its near ranks, once its own operation has been opened. Who has
 *           seen all sends rows in batches. A gateway that has seen all passes batches on, gives their credits
 *           back, and stores `arrived` when it has passed on all.
 * combine   announced likewise. Asks leave at once; a gateway that has seen all serves one by a sum, in the
 *           order of tokens; the owner takes sums in that order.
 *
 * Never: everybody at rest while an operation has not ended; a row passed on twice, or `arrived` before the
 * last; a block announced in while its last announcement is still read; more credits than a window has; a
 * store for an operation of another epoch, or in a node that has said that it is broken.
 *
 * -DBREAKS=1: the group breaks once, at any time. Each node drops what it has of the epoch and says that it is
 * broken; then both are told the next epoch and the first operation to do again. A node begins when it has the
 * other's greeting of that epoch. -DPER_NODE=1: one rank a node. -DSMALL: one batch an operation.
 *
 * -DMUTANT_... breaks one rule each; check.sh lists them.
 */
#ifdef MUTANT_SUMS_AS_ASKS_COME
#define WINDOW 2
#endif
#ifdef MUTANT_STORED_BEFORE_OPEN
#define DISPATCHES
#define DEPTH 1
#endif
#if defined(MUTANT_GREETING_SKIPPED) || defined(MUTANT_GREETING_NOT_ANSWERED) || defined(MUTANT_NO_EPOCH_CHECK) || \
    defined(MUTANT_OLD_CREDITS) || defined(MUTANT_HELD_KEPT)
#define BREAKS 1
#define PER_NODE 1
#define SMALL
#endif

#ifndef PER_NODE
#define PER_NODE 2
#endif
#define RANKS (2 * PER_NODE)
#define OPS 2
#ifndef DEPTH
#define DEPTH 2
#endif
#ifndef WINDOW
#define WINDOW 1 /* of rows and asks; that of sums has 1 */
#endif
#ifndef BREAKS
#define BREAKS 0
#endif
#define EPOCHS (BREAKS + 1)

#ifdef PATIENT
#define EAGER(s) false
#else
#define EAGER(s) ((s) < PER_NODE)
#endif

#define NODE(r) ((r) / PER_NODE)
#define GATEWAY(s) (((s) + PER_NODE) % RANKS)
#define BIT(i) (1 << (i))
#define ALL (BIT(RANKS) - 1)
#define FIRST(node) (PER_NODE * (node))
#define LAST(node) (FIRST(node) + PER_NODE - 1)
#define AT(r, op) ((r) * OPS + (op))
#define IN(e, r, op) ((e) * RANKS * OPS + AT(r, op))

#ifdef DISPATCHES
#define IS_DISPATCH(op) true
#else
#define IS_DISPATCH(op) ((op) == 0)
#endif
/* Batches of a dispatch, asks of a combine, one for a token. The second rank of a node has neither. */
#ifdef SMALL
#define NEED(s, op) ((s) != FIRST(NODE(s)) -> 0 : 1)
#else
#define NEED(s, op) ((s) != FIRST(NODE(s)) -> 0 : ((s) != 0 && !IS_DISPATCH(op) -> 1 : 2))
#endif

byte epoch[2];
bit broken[2];          /* from the answer to the break until the resume */
bit heard[2];           /* the other node's greeting of this epoch */
byte announced[RANKS];  /* operations below: by the client's order */
byte ended[RANKS];      /* a set of operations */
byte placed[RANKS];     /* likewise: all were ready, and the block has been read */
byte ready[RANKS * OPS], arrived[RANKS * OPS]; /* in a rank's block: sets of ranks */
byte sent[RANKS * OPS];                        /* batches, asks */
byte credits[RANKS], sum_credits[RANKS];       /* of a rank; of its gateway to it */
byte summed[RANKS * OPS];                      /* tokens that the owner has added up */
/* A gateway's, by the rank that it works for. */
byte held[RANKS * OPS], passed[RANKS * OPS]; /* sets of batches; of asks: not served, served */
/* On their way, by epoch. */
byte announces[EPOCHS * RANKS];                                 /* sets of ops */
byte batches[EPOCHS * RANKS * OPS], sums[EPOCHS * RANKS * OPS]; /* sets of numbers */
byte credits_back[EPOCHS * RANKS], sum_credits_back[EPOCHS * RANKS];
bit said[2];                        /* the node's greeting is on its way, or has come */
bit greetings[2], answers[2];          /* to a node; of epoch 1 */
bit told_broken[2], told_resume[2];          /* by the coordinator */
byte resume_op;

#ifdef MUTANT_NO_EPOCH_CHECK
#define CURRENT(e, node) (!broken[node])
#else
#define CURRENT(e, node) (!broken[node] && (e) == epoch[node])
#endif
#define SERVES(node) (!broken[node] && heard[node])

/* A store into memory of the node's ranks. */
#define STORES(e, node) assert((e) == epoch[node] && !broken[node])

#define PREFIX(r) ((ended[r] & 1) == 0 -> 0 : ((ended[r] & 2) == 0 -> 1 : 2))

inline announce_in(e, s, op, d) {
  STORES(e, NODE(d));
  if
  :: op >= DEPTH -> assert((placed[d] & BIT(op - DEPTH)) != 0) /* it reads the block no more */
  :: else
  fi;
  ready[AT(d, op)] = ready[AT(d, op)] | BIT(s)
}

inline arrive_in(e, s, op, node) {
  STORES(e, node);
  arrived[AT(FIRST(node), op)] = arrived[AT(FIRST(node), op)] | BIT(s);
  arrived[AT(LAST(node), op)] = arrived[AT(LAST(node), op)] | BIT(s)
}

/* Whether the rank's operations before this one have taken all credits that they need. */
#ifdef MUTANT_WINDOW_OUT_OF_ORDER
#define IN_TURN(s, op) true
#else
#define IN_TURN(s, op) ((op) == 0 || sent[AT(s, 0)] == NEED(s, 0))
#endif
#define MAY_SEND(s, op) (announced[s] > (op) && (!IS_DISPATCH(op) || (placed[s] & BIT(op)) != 0))

/* The client has submitted it, and the block of the operation DEPTH before is free, since that has ended. */
#define MAY_BEGIN(s, op) (announced[s] == (op) && PREFIX(s) + DEPTH > (op) && (EAGER(s) || PREFIX(s) == (op)))
#define IS_OPEN(s, op) (announced[s] > (op) || MAY_BEGIN(s, op))

inline announce(s, op) {
  if
  :: SERVES(NODE(s)) && MAY_BEGIN(s, op) ->
     announce_in(epoch[NODE(s)], s, op, FIRST(NODE(s)));
     announce_in(epoch[NODE(s)], s, op, LAST(NODE(s)));
     announces[epoch[NODE(s)] * RANKS + s] = announces[epoch[NODE(s)] * RANKS + s] | BIT(op);
     announced[s] = op + 1
  fi
}

inline send_batch(s, op) {
  if
  :: SERVES(NODE(s)) && MAY_SEND(s, op) && sent[AT(s, op)] < NEED(s, op) && credits[s] > 0 && IN_TURN(s, op) ->
     credits[s]--;
     batches[IN(epoch[NODE(s)], s, op)] = batches[IN(epoch[NODE(s)], s, op)] | BIT(sent[AT(s, op)]);
     sent[AT(s, op)]++
  fi
}

/* Steps that follow at once, and from which nobody can keep the rank. */
#define FOLLOWING(s, op) \
  /* all are ready: rows of near ranks are moved, too */ \
  :: SERVES(NODE(s)) && announced[s] > op && (placed[s] & BIT(op)) == 0 && ready[AT(s, op)] == ALL -> \
     placed[s] = placed[s] | BIT(op); \
     arrive_in(epoch[NODE(s)], s, op, NODE(s)) \
  :: SERVES(NODE(s)) && (ended[s] & BIT(op)) == 0 && (placed[s] & BIT(op)) != 0 && arrived[AT(s, op)] == ALL && \
       (IS_DISPATCH(op) -> sent[AT(s, op)] : summed[AT(s, op)]) == NEED(s, op) -> \
     ended[s] = ended[s] | BIT(op)

#ifdef DISPATCHES /* fewer states, so that these steps may take their time */
#define follow() skip
#else
inline follow() {
  do
  FOLLOWING(0, 0)
  FOLLOWING(0, 1)
  FOLLOWING(1, 0)
  FOLLOWING(1, 1)
#if PER_NODE == 2
  FOLLOWING(2, 0)
  FOLLOWING(2, 1)
  FOLLOWING(3, 0)
  FOLLOWING(3, 1)
#endif
  :: else -> break
  od
}
#endif

inline take_sum(e, s, op) {
  if
  /* the next token's; others stay where they are, and keep their credits */
  :: (sums[IN(e, s, op)] & BIT(summed[AT(s, op)])) != 0 && CURRENT(e, NODE(s)) ->
     STORES(e, NODE(s));
     sums[IN(e, s, op)] = sums[IN(e, s, op)] & ~BIT(summed[AT(s, op)]);
     summed[AT(s, op)]++;
#ifdef MUTANT_ONE_WINDOW
     credits_back[e * RANKS + GATEWAY(s)]++
#else
     sum_credits_back[e * RANKS + s]++
#endif
  :: sums[IN(e, s, op)] != 0 && !CURRENT(e, NODE(s)) -> sums[IN(e, s, op)] = 0
  fi
}

inline take_credit(e, s) {
  if
  :: credits_back[e * RANKS + s] > 0 ->
     credits_back[e * RANKS + s]--;
     if
#ifdef MUTANT_OLD_CREDITS
     :: true -> credits[s]++; assert(credits[s] <= WINDOW)
#else
     :: CURRENT(e, NODE(s)) -> credits[s]++; assert(credits[s] <= WINDOW)
     :: else
#endif
     fi
  fi
}

inline take_sum_credit(e, s) {
  if
  :: sum_credits_back[e * RANKS + s] > 0 ->
     sum_credits_back[e * RANKS + s]--;
     if
     :: CURRENT(e, NODE(GATEWAY(s))) -> sum_credits[s]++; assert(sum_credits[s] <= 1)
     :: else
     fi
  fi
}

/* --- the gateway of s --- */

/* One that comes before waits in the group. */
#ifdef MUTANT_STORED_BEFORE_OPEN
#define MAY_STORE(s, op) true
#else
#define MAY_STORE(s, op) IS_OPEN(GATEWAY(s), op)
#endif

inline take_announcement(e, s, op) {
  if
  :: (announces[e * RANKS + s] & BIT(op)) != 0 && (!CURRENT(e, NODE(GATEWAY(s))) || MAY_STORE(s, op)) ->
     announces[e * RANKS + s] = announces[e * RANKS + s] & ~BIT(op);
     if
     :: CURRENT(e, NODE(GATEWAY(s))) ->
#ifndef MUTANT_OWN_BLOCK_ONLY
        announce_in(e, s, op, FIRST(NODE(GATEWAY(s))) + LAST(NODE(GATEWAY(s))) - GATEWAY(s));
#endif
        announce_in(e, s, op, GATEWAY(s))
     :: else
     fi
  fi
}

inline take_batch(e, s, op, number) {
  if
  :: (batches[IN(e, s, op)] & BIT(number)) != 0 ->
     batches[IN(e, s, op)] = batches[IN(e, s, op)] & ~BIT(number);
     if
     :: CURRENT(e, NODE(GATEWAY(s))) ->
        assert(((held[AT(s, op)] | passed[AT(s, op)]) & BIT(number)) == 0);
        held[AT(s, op)] = held[AT(s, op)] | BIT(number)
     :: else
     fi
  fi
}

inline pass_on(s, op, number) {
  STORES(epoch[NODE(GATEWAY(s))], NODE(GATEWAY(s)));
  held[AT(s, op)] = held[AT(s, op)] & ~BIT(number);
  passed[AT(s, op)] = passed[AT(s, op)] | BIT(number);
  credits_back[epoch[NODE(GATEWAY(s))] * RANKS + s]++
}

#define PASSED_ALL(s, op) (passed[AT(s, op)] == BIT(NEED(s, op)) - 1)
#if defined(MUTANT_NOT_COUNTED)
#define MAY_ARRIVE(s, op) true
#elif defined(MUTANT_NOTHING_NOT_COUNTED)
#define MAY_ARRIVE(s, op) (PASSED_ALL(s, op) && NEED(s, op) != 0)
#else
#define MAY_ARRIVE(s, op) PASSED_ALL(s, op)
#endif

#ifdef MUTANT_ONE_WINDOW
#define MAY_SUM(s) (credits[GATEWAY(s)] > 0)
#else
#define MAY_SUM(s) (sum_credits[s] > 0)
#endif
#ifdef MUTANT_SUMS_AS_ASKS_COME
#define NEXT_SUM(s, op, number) true
#else
#define NEXT_SUM(s, op, number) (passed[AT(s, op)] == BIT(number) - 1)
#endif

inline serve(s, op, number) {
  if
  :: SERVES(NODE(GATEWAY(s))) && (held[AT(s, op)] & BIT(number)) != 0 && IS_DISPATCH(op) &&
       (placed[GATEWAY(s)] & BIT(op)) != 0 ->
     pass_on(s, op, number)
  :: SERVES(NODE(GATEWAY(s))) && (held[AT(s, op)] & BIT(number)) != 0 && !IS_DISPATCH(op) &&
       (placed[GATEWAY(s)] & BIT(op)) != 0 && MAY_SUM(s) &&
       NEXT_SUM(s, op, number) ->
     pass_on(s, op, number);
#ifdef MUTANT_ONE_WINDOW
     credits[GATEWAY(s)]--;
#else
     sum_credits[s]--;
#endif
     sums[IN(epoch[NODE(s)], s, op)] = sums[IN(epoch[NODE(s)], s, op)] | BIT(number)
  fi
}

inline finish(s, op) {
  if
  :: SERVES(NODE(GATEWAY(s))) && (placed[GATEWAY(s)] & BIT(op)) != 0 && MAY_ARRIVE(s, op) &&
       (arrived[AT(GATEWAY(s), op)] & BIT(s)) == 0 ->
     assert(PASSED_ALL(s, op));
     arrive_in(epoch[NODE(GATEWAY(s))], s, op, NODE(GATEWAY(s)))
  fi
}

#define OF_EPOCH(e) \
  :: atomic { take_announcement(e, s, 0); follow() } \
  :: atomic { take_announcement(e, s, 1); follow() } \
  :: atomic { take_batch(e, s, 0, 0) } \
  :: atomic { take_batch(e, s, 0, 1) } \
  :: atomic { take_batch(e, s, 1, 0) } \
  :: atomic { take_batch(e, s, 1, 1) } \
  :: atomic { take_sum(e, s, 0); follow() } \
  :: atomic { take_sum(e, s, 1); follow() } \
  :: atomic { take_credit(e, s) } \
  :: atomic { take_sum_credit(e, s) }

proctype Rank(byte s) {
  do
  :: atomic { announce(s, 0); follow() }
  :: atomic { announce(s, 1); follow() }
  :: atomic { send_batch(s, 0); follow() }
  :: atomic { send_batch(s, 1); follow() }
  :: atomic { serve(s, 0, 0) }
  :: atomic { serve(s, 0, 1) }
  :: atomic { serve(s, 1, 0) }
  :: atomic { serve(s, 1, 1) }
  :: atomic { finish(s, 0); follow() }
  :: atomic { finish(s, 1); follow() }
#ifdef DISPATCHES
  :: atomic { if FOLLOWING(s, 0) fi }
  :: atomic { if FOLLOWING(s, 1) fi }
#endif
  OF_EPOCH(0)
#if BREAKS > 0
  OF_EPOCH(1)
#endif
  od
}

#if BREAKS > 0
/* --- breaks --- */

inline forget_op(r, op) {
  ready[AT(r, op)] = 0;
  arrived[AT(r, op)] = 0;
  sent[AT(r, op)] = 0;
  summed[AT(r, op)] = 0;
  placed[r] = placed[r] & ~BIT(op)
}

/* Forgets the node's state as the gateway of s. */
inline forget_from(s) {
#ifndef MUTANT_HELD_KEPT
  held[AT(s, 0)] = 0; held[AT(s, 1)] = 0;
#endif
  passed[AT(s, 0)] = 0; passed[AT(s, 1)] = 0;
  sum_credits[s] = 1
}

inline forget_rank(r) {
  forget_op(r, 0);
  forget_op(r, 1);
  credits[r] = WINDOW;
  forget_from(GATEWAY(r))
}

/* Only the end of ended operations is known. */
inline resume_rank(r) {
  announced[r] = resume_op;
  ended[r] = BIT(resume_op) - 1;
  placed[r] = ended[r];
  /* what was done is not done again */
  if
  :: resume_op > 0 -> sent[AT(r, 0)] = NEED(r, 0)
  :: else
  fi;
  if
  :: resume_op > 1 -> sent[AT(r, 1)] = NEED(r, 1)
  :: else
  fi
}

/* Drops messages of epoch 0 to rank r, whose node has left it: they would be dropped one by one, whenever they come. */
inline drop_old(r) {
#ifndef MUTANT_OLD_CREDITS
  credits_back[r] = 0;
#endif
#ifndef MUTANT_NO_EPOCH_CHECK
  announces[GATEWAY(r)] = 0;
  batches[IN(0, GATEWAY(r), 0)] = 0;
  batches[IN(0, GATEWAY(r), 1)] = 0;
  sums[IN(0, r, 0)] = 0;
  sums[IN(0, r, 1)] = 0;
#endif
  sum_credits_back[GATEWAY(r)] = 0
}

proctype Node(byte n) {
  do
  :: atomic {
       told_broken[n] ->
       told_broken[n] = 0;
       broken[n] = 1;
       heard[n] = 0;
       forget_rank(FIRST(n));
       drop_old(FIRST(n));
#if PER_NODE == 2
       forget_rank(LAST(n));
       drop_old(LAST(n));
#endif
       skip
     }
  :: atomic {
       told_resume[n] ->
       told_resume[n] = 0;
       epoch[n]++;
       broken[n] = 0;
       resume_rank(FIRST(n));
       drop_old(FIRST(n)); /* what came since */
#if PER_NODE == 2
       resume_rank(LAST(n));
       drop_old(LAST(n));
#endif
#ifdef MUTANT_GREETING_SKIPPED
       heard[n] = 1
#endif
     }
  /* again after a while: here when the other node has dropped it */
  :: atomic { !broken[n] && !heard[n] && !said[n] -> said[n] = 1; greetings[1 - n] = 1 }
  :: atomic {
       greetings[n] ->
       greetings[n] = 0;
       if
       :: CURRENT(1, n) ->
          heard[n] = 1;
#ifndef MUTANT_GREETING_NOT_ANSWERED
          answers[1 - n] = 1
#endif
       :: else -> said[1 - n] = 0
       fi
     }
  :: atomic { answers[n] -> answers[n] = 0; heard[n] = 1 }
  od
}

#define LEAST(a, b) ((a) < (b) -> (a) : (b))

proctype Coordinator() {
  atomic { true -> told_broken[0] = 1; told_broken[1] = 1 } /* at any time */
  atomic {
    broken[0] && broken[1] ->
    resume_op = PREFIX(0);
    resume_op = LEAST(resume_op, PREFIX(1));
#if PER_NODE == 2
    resume_op = LEAST(resume_op, PREFIX(2));
    resume_op = LEAST(resume_op, PREFIX(3));
#endif
    told_resume[0] = 1;
    told_resume[1] = 1
  }
}
#endif

#define AT_END(r) (ended[r] == 3 && credits[r] == WINDOW && sum_credits[r] == 1)

active proctype Rest() {
  timeout -> /* nobody can move: everything has ended, every credit is back */
  assert(AT_END(0) && AT_END(1));
#if PER_NODE == 2
  assert(AT_END(2) && AT_END(3))
#endif
}

init {
  atomic {
    heard[0] = 1; heard[1] = 1;
    credits[0] = WINDOW; credits[1] = WINDOW;
    sum_credits[0] = 1; sum_credits[1] = 1;
    run Rank(0); run Rank(1);
#if PER_NODE == 2
    credits[2] = WINDOW; credits[3] = WINDOW;
    sum_credits[2] = 1; sum_credits[3] = 1;
    run Rank(2); run Rank(3);
#endif
#if BREAKS > 0
    run Node(0); run Node(1); run Coordinator()
#endif
  }
}
