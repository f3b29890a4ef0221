/* Ask, bid and award (docs/MOVING.md): two sequences at two sources that two instances may take, each with room for one.
 *
 * Processes: Source (its broker and migrator) per sequence, Target (its broker and worker) per instance, and Quiet, which
 * acts when nobody else can. Each step takes one message or fires one timer, and is atomic, as handle() is.
 *
 * The network is a count per kind of message, source and target: no order at all. A send may be lost (LOSS times in a
 * run) or doubled (DUP times). Timers fire whenever they are armed: a bid may be over at once, an award late by any time.
 *
 * Rules of the design that a mutation takes away (-DM_...) carry the mutation's name.
 */

#ifndef LOSS
#define LOSS 0
#endif
#ifndef DUP
#define DUP 0
#endif
#ifndef DOUBLED_KIND
#define DOUBLED_KIND AWARD
#endif
#define AWARDS 2 /* of one source: the other bid is awarded where the first was refused */

#define PLACE(s, t) (2 * (s) + (t))
#define ASK 0
#define BID 4
#define NO_BID 8
#define AWARD 12
#define TAKEN 16
#define REFUSED 20
#define SUBMIT 24
#define FREE 28 /* the migration has ended: room that was taken is free */

byte net[32];
byte losses = LOSS, doubles = DUP;

inline send(kind, s, t) {
    if
    :: net[kind + PLACE(s, t)] < 3 -> net[kind + PLACE(s, t)]++
    :: losses > 0 -> losses--
    :: doubles > 0 && (kind) == DOUBLED_KIND && net[kind + PLACE(s, t)] < 2 ->
        net[kind + PLACE(s, t)] = net[kind + PLACE(s, t)] + 2; doubles--
    :: net[kind + PLACE(s, t)] >= 3 -> skip
    fi
}
/* What may be done, or nothing */
#define WHEN(condition, ...) if :: condition -> __VA_ARGS__ :: else fi

#define ARRIVES(kind, s, t) net[kind + PLACE(s, t)] > 0 -> net[kind + PLACE(s, t)]--

/* --- targets: per source and target */

#define NONE 0
#define OPEN 1
#define USED 2 /* awarded: the worker takes it once */
#define OVER 3

byte bid[4];
bool taken[4], runs[4], ran[4];

#ifdef M_BID_UNCOUNTED
#define HELD(t) (taken[PLACE(0, t)] + taken[PLACE(1, t)])
#else
#define HELD(t) \
    (taken[PLACE(0, t)] + taken[PLACE(1, t)] + (bid[PLACE(0, t)] == OPEN) + (bid[PLACE(1, t)] == OPEN))
#endif

inline onAsk(s, t) {
    if
    :: bid[PLACE(s, t)] == NONE && HELD(t) == 0 -> bid[PLACE(s, t)] = OPEN; send(BID, s, t)
    :: bid[PLACE(s, t)] == OPEN -> send(BID, s, t)
    :: else -> send(NO_BID, s, t)
    fi
}
inline take(s, t) {
    bid[PLACE(s, t)] = USED;
    assert(taken[PLACE(0, t)] + taken[PLACE(1, t)] == 0); /* what was bid is there */
    taken[PLACE(s, t)] = true;
    send(TAKEN, s, t)
}
inline onAward(s, t) {
    if
    :: bid[PLACE(s, t)] == OPEN -> take(s, t)
#ifdef M_STALE_AWARD
    :: bid[PLACE(s, t)] == OVER -> take(s, t)
#endif
#ifdef M_AWARD_TWICE
    :: bid[PLACE(s, t)] == USED -> take(s, t)
#else
    :: bid[PLACE(s, t)] == USED && taken[PLACE(s, t)] -> send(TAKEN, s, t) /* repeated: answered, not taken again */
    :: bid[PLACE(s, t)] == USED && !taken[PLACE(s, t)] -> send(REFUSED, s, t)
#endif
    :: bid[PLACE(s, t)] == NONE -> send(REFUSED, s, t)
#ifndef M_STALE_AWARD
    :: bid[PLACE(s, t)] == OVER -> send(REFUSED, s, t)
#endif
    fi
}

#define STEPS_TARGET(s) \
    :: atomic { ARRIVES(ASK, s, t); onAsk(s, t) } \
    :: atomic { ARRIVES(AWARD, s, t); onAward(s, t) } \
    EXPIRES(s) \
    :: atomic { taken[PLACE(s, t)] && !runs[PLACE(s, t)] -> taken[PLACE(s, t)] = false /* no news for too long */ } \
    :: atomic { ARRIVES(FREE, s, t); WHEN(!runs[PLACE(s, t)], taken[PLACE(s, t)] = false) } \
    :: atomic { ARRIVES(SUBMIT, s, t); \
        if \
        :: !ran[PLACE(s, t)] && (taken[PLACE(s, t)] || bid[PLACE(s, t)] == USED) -> \
            assert(!runs[PLACE(s, 0)] && !runs[PLACE(s, 1)] || runs[PLACE(s, t)]); /* one target decodes it */ \
            runs[PLACE(s, t)] = true; /* without its room it is computed anew, and waits for blocks */ ran[PLACE(s, t)] = true \
        :: else \
        fi } \
    :: atomic { runs[PLACE(s, t)] -> runs[PLACE(s, t)] = false; taken[PLACE(s, t)] = false }
#ifdef M_NO_EXPIRY
#define EXPIRES(s)
#else
#define EXPIRES(s) :: atomic { bid[PLACE(s, t)] == OPEN -> bid[PLACE(s, t)] = OVER }
#endif

proctype Target(byte t) {
end:
    do
    STEPS_TARGET(0)
    STEPS_TARGET(1)
    od
}

/* --- sources */

#define ASKING 0
#define MOVING 1
#define ENDED 2
#define RESTS 3

byte state[2], awarded[2], submits[2], has[4], awards[2];

inline award(s, t) {
    state[s] = MOVING; awarded[s] = t; awards[s]++; has[PLACE(s, t)] = OVER; send(AWARD, s, t)
}
inline next(s) {
    if
    :: has[PLACE(s, 0)] == OPEN && awards[s] < AWARDS -> award(s, 0)
    :: has[PLACE(s, 1)] == OPEN && awards[s] < AWARDS -> award(s, 1)
    :: else -> state[s] = RESTS
    fi
}
inline onTaken(s, t) {
    if
#ifdef M_ANY_ANSWER
    :: state[s] == MOVING || state[s] == ENDED -> submits[s]++; state[s] = ENDED; send(SUBMIT, s, t)
    :: else
#else
    :: state[s] == MOVING && awarded[s] == t -> submits[s]++; state[s] = ENDED; send(SUBMIT, s, t)
    :: else /* of an award that was given up: its room ends by itself */
#endif
    fi;
    assert(submits[s] <= 1) /* committed once */
}

#define STEPS_SOURCE(t) \
    :: atomic { ARRIVES(BID, s, t); \
        WHEN(state[s] != RESTS && has[PLACE(s, t)] == NONE, has[PLACE(s, t)] = OPEN) } \
    :: atomic { ARRIVES(NO_BID, s, t) } \
    :: atomic { ARRIVES(TAKEN, s, t); onTaken(s, t) } \
    :: atomic { ARRIVES(REFUSED, s, t); WHEN(state[s] == MOVING && awarded[s] == t, next(s)) } \
    :: atomic { state[s] == MOVING && awarded[s] == t -> send(FREE, s, t); next(s) /* unanswered */ }

proctype Source(byte s) {
    atomic { send(ASK, s, 0); send(ASK, s, 1) }
end:
    do
    STEPS_SOURCE(0)
    STEPS_SOURCE(1)
    :: atomic { state[s] == ASKING -> next(s) /* the deadline of bids, whoever has answered */ }
    od
}

proctype Quiet() {
    timeout;
    assert(state[0] >= ENDED && state[1] >= ENDED);
    assert(bid[0] != OPEN && bid[1] != OPEN && bid[2] != OPEN && bid[3] != OPEN); /* nothing is held for ever */
    assert(!taken[0] && !taken[1] && !taken[2] && !taken[3])
}

init {
    atomic { run Source(0); run Source(1); run Target(0); run Target(1); run Quiet() }
}
