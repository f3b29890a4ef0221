/* The migration handshake (docs/MIGRATION.md): a sequence of N tokens that decodes at A and is moved to B.
 *
 * Processes: Ingress, A and B (workers with their engines), S and T (migrators of A and B), Clock, and Quiet, which acts
 * when nobody else can. Each step of a process is one message taken or one timer fired, and is atomic, as handle() is.
 *
 * The network is a count per kind of message: no order at all. A send may be lost (LOSS times in a run) or doubled (DUP
 * times); the copies arrive whenever. Timers fire whenever they are armed, but for what clocks promise (uL, uF below).
 * One process may crash at any moment (-DCRASH_A ... -DCRASH_T; B and T come back empty with -DRESTART).
 *
 * Tokens are unseeded: what A decodes at an index differs from what B decodes there. Every run is finite, so a request
 * that stays nowhere is an end state, and Quiet looks at each of them.
 *
 * Rules of the design that a mutation takes away (-DM_...) carry the mutation's name. The README maps steps to code.
 */

#ifndef N
#define N 2 /* output tokens of the whole sequence: 2 or 3 */
#endif
#ifndef ATTEMPTS
#define ATTEMPTS 1 /* migrations one after the other, each with a name of its own */
#endif
#ifndef LOSS
#define LOSS 0
#endif
#ifndef DUP
#define DUP 0
#endif
#ifndef PREEMPT
#define PREEMPT 0 /* preemptions of the sequence at A: its blocks are freed and used by others */
#endif
#ifndef MISJUDGE
#define MISJUDGE 0 /* times that ingress takes a living A for dead */
#endif
#define PROBES (LOSS + 4)

#if N == 2
#define IF3(...)
#else
#define IF3(...) __VA_ARGS__
#endif

#if ATTEMPTS == 1
#define EACH(x) x(0)
#else
#define EACH(x) x(0) x(1)
#endif

/* --- the network: kinds of messages; those of a migration come once per attempt */

#define K 2 /* attempts at most */
#define LEASE 0
#define LEASED (LEASE + K)
#define LEASE_NO (LEASED + K)
#define FREEZE (LEASE_NO + K)
#define FROZEN (FREEZE + K)
#define FREEZE_NO (FROZEN + K)
#define END_MOVED (FREEZE_NO + K)
#define END_THAW (END_MOVED + K)
#define ALLOT (END_THAW + K)
#define ALLOTTED (ALLOT + K)
#define ALLOT_NO (ALLOTTED + K)
#define PREPARE (ALLOT_NO + K)
#define PREPARED (PREPARE + K)
#define PULL (PREPARED + K)
#define PULLED (PULL + K)
#define COMMIT (PULLED + K)
#define COMMITTED (COMMIT + K)
#define REFUSED (COMMITTED + K) /* the target does not have it and will not */
#define UNKNOWN (REFUSED + K)   /* T cannot say whether B has it */
#define ABORT (UNKNOWN + K)
#define RESERVE (ABORT + K)
#define RESERVED (RESERVE + K)
#define RESERVE_NO (RESERVED + K)
#define READ (RESERVE_NO + K)
#define READ_DONE (READ + K)
#define READ_NO (READ_DONE + K)
#define UNRESERVE (READ_NO + K)
#define SUBMIT (UNRESERVE + K)
#define ACCEPTED (SUBMIT + K)
#define SUBMIT_NO (ACCEPTED + K)
#define CANCEL_B (SUBMIT_NO + K)
#define RESEND_B (CANCEL_B + K)
#define FORGOT_B (RESEND_B + K)
#define MOVED (FORGOT_B + K)        /* + K * incarnation */
#define CANCEL_A (MOVED + 2 * K)
#define RESEND_A (CANCEL_A + 1)
#define FORGOT_A (RESEND_A + 1)
#define TOKEN_A (FORGOT_A + 1)      /* + index */
#define RESENT_A (TOKEN_A + N)      /* + tokens that A has */
#define TOKEN_B (RESENT_A + N + 1)  /* + N * (K * incarnation + attempt) + index */
#define RESENT_B (TOKEN_B + 2 * K * N) /* + (N + 1) * attempt + tokens that B has */
#define KINDS (RESENT_B + K * (N + 1))

#ifdef DOUBLED_KIND
#define DOUBLED(m) ((m) >= (DOUBLED_KIND) && (m) < (DOUBLED_KIND) + K)
#else
#define DOUBLED(m) true
#endif

byte net[KINDS];
byte losses = LOSS, doubles = DUP;

inline send(m) {
    if
    :: net[m] < 3 -> net[m]++
    :: losses > 0 -> losses--
    :: doubles > 0 && DOUBLED(m) && net[m] < 2 -> net[m] = net[m] + 2; doubles--
    :: net[m] >= 3 -> skip
    fi
}
#define ARRIVES(m) net[m] > 0 -> net[m]--

/* --- ingress's states */

#define AT_A 0
#define AT_B 1
#define TENTATIVE 2 /* A is lost and B is asked whether it has the sequence */
#define HANDS 3     /* continued elsewhere by recompute, in an epoch of its own */
#define FINISHED 4
#define CANCELLED 5

/* --- clocks: the reader's deadline passes before the deadline of the one who pinned, whatever messages take */

bool frozenAsked[K]; /* S has asked for the freeze: its clock runs */
bool uL[K];          /* B's deadline of the lease has passed */
bool uF[K];          /* B's deadline of the freeze has passed; S's passes later, A's later still */

/* --- the source's worker and engine */

#define NONE 0
#define RUN 1
#define STILL 2 /* frozen */
#define WAIT 3  /* preempted */
#define GONE 4  /* moved or cancelled: nothing of it is kept */
#define DONE 5

#define ON 1
#define OVER 2

bool aUp = true;
byte aSeq = RUN, aTokens, aFrozenFor;
byte lease[K];       /* NONE, ON, OVER: of each migration */
byte frozenAt[K];    /* tokens when it was frozen */
byte blocks;         /* generation of the sequence's blocks: rises when they are freed, for others may use them then */
byte leasedBlocks[K];
bool ofSequence = true, pinned[K];
byte preemptions = PREEMPT;

#define PINS (pinned[0] || pinned[1])

inline freeIfUnused() {
    if
    :: !ofSequence && !PINS -> blocks++
    :: else
    fi
}
inline unpin(t) {
    assert(pinned[t]); /* freed once */
    pinned[t] = false;
    lease[t] = OVER
}
inline letGo() {
    assert(ofSequence);
    ofSequence = false
}
/* What ends or is preempted loses its leases at once */
inline loseLeases() {
    if
    :: lease[0] == ON -> unpin(0)
    :: else
    fi;
    if
    :: lease[1] == ON -> unpin(1)
    :: else
    fi
}
inline decodeA() {
    send(TOKEN_A + aTokens);
    aTokens++;
    if
    :: aTokens == N -> aSeq = DONE; letGo(); loseLeases(); freeIfUnused()
    :: else
    fi
}

inline onLease(t) {
    if
    :: aSeq == RUN && lease[t] == NONE -> lease[t] = ON; pinned[t] = true; leasedBlocks[t] = blocks; send(LEASED + t)
#ifdef M_LEASE_AGAIN
    :: aSeq == RUN && lease[t] == OVER -> lease[t] = ON; pinned[t] = true; uL[t] = false; send(LEASED + t)
#endif
    :: lease[t] == ON -> send(LEASED + t)
    :: else -> send(LEASE_NO + t)
    fi
}
inline onFreeze(t) {
    if
    :: aSeq == RUN && lease[t] == ON ->
        aSeq = STILL; aFrozenFor = t; frozenAt[t] = aTokens; send(FROZEN + t)
#ifdef M_LAPSED_LEASE
    :: aSeq == RUN && lease[t] == OVER ->
        aSeq = STILL; aFrozenFor = t; frozenAt[t] = aTokens; lease[t] = ON; pinned[t] = true; send(FROZEN + t)
#endif
    :: aSeq == STILL && aFrozenFor == t -> send(FROZEN + t)
    :: else -> send(FREEZE_NO + t)
    fi
}
inline thaw(t) {
    if
    :: lease[t] == ON -> unpin(t)
    :: lease[t] == NONE -> lease[t] = OVER
    :: else
    fi;
    if
    :: aSeq == STILL && aFrozenFor == t -> aSeq = RUN
    :: else
    fi;
    freeIfUnused()
}
inline onEndMoved(t) {
    if
    :: aSeq == STILL && aFrozenFor == t -> aSeq = GONE; letGo(); unpin(t); freeIfUnused()
    :: aSeq == GONE && lease[t] == ON -> unpin(t); freeIfUnused()
    :: else /* thawed meanwhile: ingress judges */
    fi
}
inline onCancelA() {
    if
    :: aSeq == RUN -> aSeq = GONE; letGo(); loseLeases(); freeIfUnused()
    :: aSeq == WAIT -> aSeq = GONE
#ifdef M_CANCEL_UNPINS
    :: aSeq == STILL -> aSeq = GONE; letGo(); loseLeases(); freeIfUnused()
#else
    :: aSeq == STILL -> aSeq = GONE; letGo() /* B may be reading: the pin stays for the freeze's time */
#endif
    :: else
    fi
}

#define STEPS_A(t) \
    :: atomic { aUp && ARRIVES(LEASE + t); onLease(t) } \
    :: atomic { aUp && ARRIVES(FREEZE + t); onFreeze(t) } \
    :: atomic { aUp && ARRIVES(END_THAW + t); thaw(t) } \
    :: atomic { aUp && ARRIVES(END_MOVED + t); onEndMoved(t) } \
    :: atomic { aUp && lease[t] == ON && aSeq == RUN -> uL[t] = true; unpin(t); freeIfUnused() /* lapses */ } \
    :: atomic { aUp && lease[t] == ON && aSeq == STILL && aFrozenFor != t -> uL[t] = true; unpin(t) } \
    THAWS(t) \
    :: atomic { aUp && lease[t] == ON && aSeq == GONE && uF[t] -> unpin(t); freeIfUnused() }
#ifdef M_NO_THAW
#define THAWS(t)
#else
#define THAWS(t) :: atomic { aUp && aSeq == STILL && aFrozenFor == t && uF[t] -> thaw(t) }
#endif

proctype A() {
end:
    do
    :: atomic { aUp && aSeq == RUN -> decodeA() }
    :: atomic { aUp && aSeq == RUN && preemptions > 0 ->
        preemptions--; aSeq = WAIT; letGo(); loseLeases(); freeIfUnused() }
    :: atomic { aUp && aSeq == WAIT -> aSeq = RUN; ofSequence = true }
    EACH(STEPS_A)
    :: atomic { aUp && ARRIVES(CANCEL_A); onCancelA() }
    :: atomic { aUp && ARRIVES(RESEND_A);
        if
        :: aSeq == GONE -> send(FORGOT_A)
        :: else -> send(RESENT_A + aTokens)
        fi }
#ifdef CRASH_A
    :: atomic { aUp -> aUp = false; aSeq = GONE; ofSequence = false; pinned[0] = false; pinned[1] = false }
#endif
    od
}

/* --- the target's worker and engine */

#define ABSENT 0
#define GOOD 1
#define BAD 2 /* what was read is not what the sequence's blocks held, and nobody noticed */
#define LOADING 1

bool bUp = true;
byte bIncarnation, bFence;
byte room[K];      /* NONE, ON, OVER: reservations */
bool taken[K];     /* blocks are reserved or used */
bool reading[K];
byte pulled[K];    /* the full blocks in the reservation */
byte bSeq[K];      /* NONE, LOADING, STILL unused, RUN -> 2, see below */
byte brought[K], bTokens[K];
bool cached[K];
#define B_RUN 2
#define B_DONE 3
#define B_GONE 4

byte iState, iEpoch = 1, epochMax = 1; /* of ingress, see there */
byte epochOf[K];   /* allotted by ingress, carried by the messages of the attempt */

inline giveBack(t) {
    if
    :: room[t] == ON -> assert(taken[t]); taken[t] = false; reading[t] = false; pulled[t] = ABSENT
    :: else
    fi;
    room[t] = OVER
}
inline endB(t, how) {
    assert(taken[t]);
    taken[t] = false;
    bSeq[t] = how
}
/* What is read is right if the blocks were not freed before the read ended */
inline looked(t, what) {
    if
    :: !aUp -> what = ABSENT
    :: aUp && blocks == leasedBlocks[t] && (ofSequence || PINS) -> what = GOOD
    :: aUp && !(blocks == leasedBlocks[t] && (ofSequence || PINS)) -> what = BAD
    fi
}
inline readEnds(t) {
    reading[t] = false;
    if
#ifndef M_LATE_READ
    :: uL[t] -> pulled[t] = ABSENT
    :: !uL[t] -> looked(t, pulled[t])
#else
    :: true -> looked(t, pulled[t])
#endif
    fi;
    if
    :: pulled[t] == ABSENT -> send(READ_NO + t)
    :: else -> send(READ_DONE + t)
    fi;
#ifdef M_CACHED_EARLY
    cached[t] = true
#endif
}
inline onRead(t) {
    if
    :: room[t] == ON && pulled[t] == ABSENT -> reading[t] = true
#ifdef M_READ_AGAIN
    :: room[t] == ON && pulled[t] != ABSENT -> reading[t] = true
#else
    :: room[t] == ON && pulled[t] != ABSENT -> send(READ_DONE + t)
#endif
    :: else -> send(READ_NO + t)
    fi
}
inline onSubmit(t) {
    if
    :: bSeq[t] == NONE && epochOf[t] > bFence ->
        bSeq[t] = LOADING; bFence = epochOf[t]; brought[t] = frozenAt[t]; bTokens[t] = frozenAt[t];
        if
        :: t == 1 && (bSeq[0] == LOADING || bSeq[0] == B_RUN) -> endB(0, B_GONE)
        :: else
        fi;
        reading[t] = false;
        if
        :: room[t] != ON -> pulled[t] = ABSENT /* recomputed from the tokens that came along */
        :: else
        fi;
        room[t] = OVER; taken[t] = true
#ifdef M_TOLD_EARLY
        ; send(ACCEPTED + t); send(MOVED + K * bIncarnation + t)
#endif
    :: bSeq[t] == B_RUN || bSeq[t] == B_DONE -> send(ACCEPTED + t)
    :: bSeq[t] == LOADING -> skip /* answered when it has been read */
    :: else -> send(SUBMIT_NO + t)
    fi
}
byte tail;
inline loaded(t) {
    if
#ifndef M_LATE_READ
    :: uF[t] -> tail = ABSENT
    :: !uF[t] -> looked(t, tail)
#else
    :: true -> looked(t, tail)
#endif
    fi;
    assert(pulled[t] != BAD && tail != BAD); /* never decoded from */
    tail = 0;
    pulled[t] = ABSENT;
    bSeq[t] = B_RUN;
    assert(!(iState == HANDS && iEpoch == epochOf[t])); /* one decoder per epoch */
#ifndef M_TOLD_EARLY
    send(ACCEPTED + t);
    send(MOVED + K * bIncarnation + t)
#endif
}
inline onCancelB(t) {
    if
    :: epochOf[t] > bFence -> bFence = epochOf[t]
    :: else
    fi;
    if
    :: bSeq[t] == LOADING || bSeq[t] == B_RUN -> endB(t, B_GONE)
    :: bSeq[t] == B_DONE -> bSeq[t] = B_GONE
    :: else
    fi
}
inline decodeB(t) {
    send(TOKEN_B + N * (K * bIncarnation + t) + bTokens[t]);
    bTokens[t]++;
    if
    :: bTokens[t] == N -> endB(t, B_DONE)
    :: else
    fi
}

#define STEPS_B(t) \
    :: atomic { bUp && bSeq[t] == B_RUN -> decodeB(t) } \
    :: atomic { bUp && ARRIVES(RESERVE + t); \
        if \
        :: room[t] == NONE -> room[t] = ON; taken[t] = true; send(RESERVED + t) \
        :: room[t] == ON -> send(RESERVED + t) \
        :: else -> send(RESERVE_NO + t) \
        fi } \
    :: atomic { bUp && room[t] == ON -> giveBack(t) /* no news for too long */ } \
    :: atomic { bUp && ARRIVES(UNRESERVE + t); giveBack(t) } \
    :: atomic { bUp && ARRIVES(READ + t); onRead(t) } \
    :: atomic { bUp && reading[t] -> readEnds(t) } \
    :: atomic { bUp && ARRIVES(SUBMIT + t); onSubmit(t) } \
    :: atomic { bUp && bSeq[t] == LOADING -> loaded(t) } \
    :: atomic { bUp && ARRIVES(CANCEL_B + t); onCancelB(t) } \
    :: atomic { bUp && ARRIVES(RESEND_B + t); \
        if \
        :: bSeq[t] == NONE || bSeq[t] == B_GONE -> send(FORGOT_B + t) \
        :: else -> send(RESENT_B + (N + 1) * t + bTokens[t]) \
        fi } \
    :: atomic { bUp && cached[t] && pulled[t] == BAD -> assert(false) /* another request finds it */ }

proctype B() {
end:
    do
    EACH(STEPS_B)
#ifdef CRASH_B
    :: atomic { bUp && bIncarnation == 0 ->
        bUp = false; taken[0] = false; taken[1] = false; reading[0] = false; reading[1] = false;
        bSeq[0] = NONE; bSeq[1] = NONE; room[0] = NONE; room[1] = NONE; pulled[0] = ABSENT; pulled[1] = ABSENT;
        bFence = 0; bTokens[0] = 0; bTokens[1] = 0; brought[0] = 0; brought[1] = 0 }
#ifdef RESTART
    :: atomic { !bUp && bIncarnation == 0 -> bUp = true; bIncarnation = 1 }
#endif
#endif
    od
}

/* --- the source's migrator */

#define S_IDLE 0
#define S_LEASE 1
#define S_ALLOT 2
#define S_PREPARE 3
#define S_PULL 4
#define S_FREEZE 5
#define S_COMMIT 6
#define S_OVER 7

byte sStep, attempt;

inline giveUp() {
    send(ABORT + attempt);
    send(END_THAW + attempt);
    attempt++;
    if
    :: attempt < ATTEMPTS -> sStep = S_IDLE
    :: else -> sStep = S_OVER; attempt = ATTEMPTS - 1
    fi
}
inline next(t, from, to, m) {
    if
    :: sStep == from && attempt == t -> sStep = to; send(m + t)
    :: else /* late */
    fi
}
inline refusedAt(t, from) {
    if
    :: sStep == from && attempt == t -> giveUp()
    :: else
    fi
}

#define STEPS_S(t) \
    :: atomic { sUp && ARRIVES(LEASED + t); next(t, S_LEASE, S_ALLOT, ALLOT) } \
    :: atomic { sUp && ARRIVES(LEASE_NO + t); refusedAt(t, S_LEASE) } \
    :: atomic { sUp && ARRIVES(ALLOTTED + t); next(t, S_ALLOT, S_PREPARE, PREPARE) } \
    :: atomic { sUp && ARRIVES(ALLOT_NO + t); refusedAt(t, S_ALLOT) } \
    :: atomic { sUp && ARRIVES(PREPARED + t); next(t, S_PREPARE, S_PULL, PULL) } \
    :: atomic { sUp && ARRIVES(PULLED + t); \
        if \
        :: sStep == S_PULL && attempt == t -> sStep = S_FREEZE; frozenAsked[t] = true; send(FREEZE + t) \
        :: else \
        fi } \
    :: atomic { sUp && ARRIVES(FROZEN + t); next(t, S_FREEZE, S_COMMIT, COMMIT) } \
    :: atomic { sUp && ARRIVES(FREEZE_NO + t); refusedAt(t, S_FREEZE) } \
    :: atomic { sUp && ARRIVES(COMMITTED + t); next(t, S_COMMIT, S_OVER, END_MOVED) } \
    :: atomic { sUp && ARRIVES(UNKNOWN + t); \
        if \
        :: sStep == S_PREPARE || sStep == S_PULL -> refusedAt(t, sStep) \
        :: else /* after a commit only the deadline ends the freeze */ \
        fi } \
    :: atomic { sUp && ARRIVES(REFUSED + t); \
        if \
        :: sStep == S_PREPARE || sStep == S_PULL || sStep == S_COMMIT -> refusedAt(t, sStep) \
        :: else \
        fi }

bool sUp = true;
proctype S() {
end:
    do
    :: atomic { sUp && sStep == S_IDLE -> sStep = S_LEASE; send(LEASE + attempt) }
    :: atomic { sUp && sStep >= S_LEASE && sStep <= S_FREEZE -> giveUp() /* unanswered */ }
#ifdef M_EARLY_THAW
    :: atomic { sUp && sStep == S_COMMIT -> giveUp() }
#else
    :: atomic { sUp && sStep == S_COMMIT && uF[attempt] -> giveUp() }
#endif
    EACH(STEPS_S)
#ifdef CRASH_S
    :: atomic { sUp -> sUp = false }
#endif
    od
}

/* --- the target's migrator */

#define T_NONE 0
#define T_RESERVE 1
#define T_READY 2
#define T_READ 3
#define T_PULLED 4
#define T_SUBMIT 5
#define T_COMMITTED 6
#define T_OVER 7   /* B never gets it from here */
#define T_UNSURE 8 /* submitted and unanswered */

bool tUp = true, tRestarted;
byte tStep[K];

inline closeT(t) {
    tStep[t] = T_OVER;
    send(UNRESERVE + t)
}

#define STEPS_T(t) \
    :: atomic { tUp && ARRIVES(PREPARE + t); \
        if \
        :: tStep[t] == T_NONE -> tStep[t] = T_RESERVE; send(RESERVE + t) \
        :: tStep[t] == T_READY -> send(PREPARED + t) \
        :: tStep[t] == T_OVER -> send(REFUSED + t) \
        :: else \
        fi } \
    :: atomic { tUp && ARRIVES(RESERVED + t); \
        if \
        :: tStep[t] == T_RESERVE -> tStep[t] = T_READY; send(PREPARED + t) \
        :: else \
        fi } \
    :: atomic { tUp && ARRIVES(RESERVE_NO + t); \
        if \
        :: tStep[t] == T_RESERVE -> tStep[t] = T_OVER; send(REFUSED + t) \
        :: else \
        fi } \
    :: atomic { tUp && ARRIVES(PULL + t); \
        if \
        :: tStep[t] == T_READY -> tStep[t] = T_READ; send(READ + t) \
        :: tStep[t] == T_PULLED -> send(PULLED + t) \
        :: tStep[t] == T_NONE || tStep[t] == T_OVER -> send(REFUSED + t) \
        :: else \
        fi } \
    :: atomic { tUp && ARRIVES(READ_DONE + t); \
        if \
        :: tStep[t] == T_READ -> tStep[t] = T_PULLED; send(PULLED + t) \
        :: else \
        fi } \
    :: atomic { tUp && ARRIVES(READ_NO + t); \
        if \
        :: tStep[t] == T_READ -> closeT(t); send(REFUSED + t) \
        :: else \
        fi } \
    :: atomic { tUp && ARRIVES(COMMIT + t); \
        if \
        :: tStep[t] == T_PULLED -> tStep[t] = T_SUBMIT; send(SUBMIT + t) \
        :: tStep[t] == T_COMMITTED -> send(COMMITTED + t) \
        :: tStep[t] == T_OVER -> send(REFUSED + t) \
        :: tStep[t] == T_NONE -> COMMIT_UNKNOWN(t) \
        :: tStep[t] == T_UNSURE -> send(UNKNOWN + t) \
        :: else \
        fi } \
    :: atomic { tUp && ARRIVES(ACCEPTED + t); \
        if \
        :: tStep[t] == T_SUBMIT || tStep[t] == T_UNSURE -> tStep[t] = T_COMMITTED; send(COMMITTED + t) \
        :: else \
        fi } \
    :: atomic { tUp && ARRIVES(SUBMIT_NO + t); \
        if \
        :: tStep[t] == T_SUBMIT -> closeT(t); send(REFUSED + t) \
        :: else \
        fi } \
    :: atomic { tUp && ARRIVES(ABORT + t); \
        if \
        :: tStep[t] == T_NONE -> tStep[t] = T_OVER \
        :: tStep[t] >= T_RESERVE && tStep[t] <= T_PULLED -> closeT(t) \
        :: else \
        fi } \
    :: atomic { tUp && (tStep[t] == T_RESERVE || tStep[t] == T_READ) -> closeT(t); send(REFUSED + t) } \
    :: atomic { tUp && (tStep[t] == T_READY || tStep[t] == T_PULLED) -> closeT(t) /* no news */ } \
    :: atomic { tUp && tStep[t] == T_SUBMIT -> tStep[t] = T_UNSURE; send(UNKNOWN + t) }
#ifdef M_UNKNOWN_IS_NO
#define COMMIT_UNKNOWN(t) send(REFUSED + t)
#else
#define COMMIT_UNKNOWN(t) send(UNKNOWN + t)
#endif

proctype T() {
end:
    do
    EACH(STEPS_T)
#ifdef CRASH_T
    :: atomic { tUp && !tRestarted -> tUp = false; tStep[0] = T_NONE; tStep[1] = T_NONE }
#ifdef RESTART
    :: atomic { !tUp && !tRestarted -> tUp = true; tRestarted = true }
#endif
#endif
    od
}

/* --- ingress: owner of the token log, and judge */

byte known;        /* tokens in the log */
byte ofA;          /* how many of them, from the first on, are A's */
byte restEpoch;    /* what epoch the others were decoded in */
bool open;         /* there is an allotment */
byte openFor, openIncarnation;
byte asked;        /* 0, 1: A is asked to resend, 2: B */
byte misjudgements = MISJUDGE;
bool allotted[K];

inline cancelA() {
    if
    :: net[CANCEL_A] == 0 -> send(CANCEL_A)
    :: else
    fi
}
inline cancelB(t) {
    if
    :: net[CANCEL_B + t] == 0 -> send(CANCEL_B + t)
    :: else
    fi
}
inline ended() {
    if
    :: known == N -> iState = FINISHED
    :: else
    fi
}
inline appendA() {
    assert(ofA == known); /* its history is the log */
    known++;
    ofA++
}
/* Told with each chunk and with SequenceMoved: what the attempt's submission carried */
#define brought_(t) frozenAt[t]

inline appendB(t) {
    if
    :: known < brought_(t) -> appendA()
    :: else ->
        assert(ofA == brought_(t) && (known == ofA || restEpoch == iEpoch));
        restEpoch = iEpoch;
        known++
    fi
}
inline askA() {
    if
    :: asked != 1 -> asked = 1; send(RESEND_A)
    :: else
    fi
}
inline askB(t) {
    if
    :: asked != 2 -> asked = 2; send(RESEND_B + t)
    :: else
    fi
}
inline takeBack() {
    epochMax++;
    iEpoch = epochMax;
    iState = HANDS;
    asked = 0;
    cancelA();
    if
    :: open -> cancelB(openFor)
    :: else
    fi;
    open = false;
    assert(!(bSeq[0] == B_RUN && epochOf[0] == iEpoch)); /* one decoder per epoch */
    assert(!(bSeq[1] == B_RUN && epochOf[1] == iEpoch))
}
inline lostA() {
    if
    :: open -> iState = TENTATIVE; cancelA(); asked = 0; askB(openFor)
    :: else -> takeBack()
    fi
}
inline judge(t, base) {
    if
    :: known <= base -> iState = AT_B; iEpoch = epochOf[t]; asked = 0; cancelA()
    :: known > base && iState == AT_A -> open = false; cancelB(t)
    :: known > base && iState == TENTATIVE -> takeBack()
    fi
}
/* B speaks in an epoch that ingress knows and has not voided */
#define HEARD(t, inc) (open && openFor == t && openIncarnation == inc && iState <= TENTATIVE)

inline onMoved(t, inc) {
    if
    :: HEARD(t, inc) && iState != AT_B ->
        judge(t, brought_(t));
        if
        :: iState == AT_B && known < brought_(t) -> askB(t)
        :: else
        fi
    :: HEARD(t, inc) && iState == AT_B -> skip
    :: else -> cancelB(t)
    fi
}
#ifdef M_BASE_IS_FIRST
#define BASE(t, i) i
#else
#define BASE(t, i) brought_(t)
#endif
inline onTokenB(t, inc, i) {
    if
    :: HEARD(t, inc) ->
        if
        :: iState != AT_B -> judge(t, BASE(t, i))
        :: else
        fi;
        if
        :: iState == AT_B && i == known -> appendB(t); ended()
        :: iState == AT_B && i > known -> askB(t)
        :: else
        fi
    :: else -> cancelB(t)
    fi
}
inline onResentB(t, count) {
    if
    :: asked == 2 && open && openFor == t ->
        asked = 0;
        if
        :: iState == TENTATIVE -> judge(t, brought_(t))
        :: else
        fi;
        do
        :: iState == AT_B && known < count -> appendB(t)
        :: else -> break
        od;
        if
        :: iState == AT_B -> ended()
        :: else
        fi
    :: else
    fi
}
inline onForgotB(t) {
    if
    :: asked == 2 && open && openFor == t && (iState == AT_B || iState == TENTATIVE) -> takeBack()
    :: else
    fi
}
inline onTokenA(i) {
    if
    :: iState == AT_A && i == known -> appendA(); ended()
    :: iState == AT_A && i > known -> askA()
    :: iState == AT_A && i < known -> skip
    :: else -> cancelA()
    fi
}
inline onResentA(count) {
    if
    :: asked == 1 ->
        asked = 0;
        do
        :: iState == AT_A && known < count -> appendA()
        :: else -> break
        od;
        if
        :: iState == AT_A -> ended()
        :: else
        fi
    :: else
    fi
}
inline onAllot(t) {
    if
    :: iState != AT_A || allotted[t] && !(open && openFor == t) -> send(ALLOT_NO + t)
    :: iState == AT_A && open && openFor == t -> send(ALLOTTED + t)
    :: iState == AT_A && !allotted[t] ->
        allotted[t] = true;
#ifdef M_NO_ALLOTMENT
        epochOf[t] = iEpoch + 1;
#else
        epochMax++;
        epochOf[t] = epochMax;
#endif
        open = true; openFor = t; openIncarnation = bIncarnation;
        send(ALLOTTED + t)
    fi
}

#define TOKENS_B(t, inc) \
    :: atomic { ARRIVES(MOVED + K * inc + t); onMoved(t, inc) } \
    :: atomic { ARRIVES(TOKEN_B + N * (K * inc + t) + 0); onTokenB(t, inc, 0) } \
    :: atomic { ARRIVES(TOKEN_B + N * (K * inc + t) + 1); onTokenB(t, inc, 1) } \
    IF3(:: atomic { ARRIVES(TOKEN_B + N * (K * inc + t) + 2); onTokenB(t, inc, 2) })
#ifdef RESTART
#define ALL_TOKENS_B(t) TOKENS_B(t, 0) TOKENS_B(t, 1)
#else
#define ALL_TOKENS_B(t) TOKENS_B(t, 0)
#endif
#define STEPS_I(t) \
    ALL_TOKENS_B(t) \
    :: atomic { ARRIVES(RESENT_B + (N + 1) * t + 0); onResentB(t, 0) } \
    :: atomic { ARRIVES(RESENT_B + (N + 1) * t + 1); onResentB(t, 1) } \
    :: atomic { ARRIVES(RESENT_B + (N + 1) * t + 2); onResentB(t, 2) } \
    IF3(:: atomic { ARRIVES(RESENT_B + (N + 1) * t + 3); onResentB(t, 3) }) \
    :: atomic { ARRIVES(FORGOT_B + t); onForgotB(t) } \
    :: atomic { ARRIVES(ALLOT + t); onAllot(t) }

proctype Ingress() {
end:
    do
    :: atomic { ARRIVES(TOKEN_A + 0); onTokenA(0) }
    :: atomic { ARRIVES(TOKEN_A + 1); onTokenA(1) }
    IF3(:: atomic { ARRIVES(TOKEN_A + 2); onTokenA(2) })
    :: atomic { ARRIVES(RESENT_A + 0); onResentA(0) }
    :: atomic { ARRIVES(RESENT_A + 1); onResentA(1) }
    :: atomic { ARRIVES(RESENT_A + 2); onResentA(2) }
    IF3(:: atomic { ARRIVES(RESENT_A + 3); onResentA(3) })
    :: atomic { ARRIVES(FORGOT_A);
        if
        :: asked == 1 && iState == AT_A -> asked = 0; lostA()
        :: else
        fi }
    EACH(STEPS_I)
    :: atomic { !aUp && iState == AT_A -> lostA() }
    :: atomic { misjudgements > 0 && iState == AT_A -> misjudgements--; lostA() }
    :: atomic { open && (!bUp || bIncarnation != openIncarnation) && (iState == AT_B || iState == TENTATIVE) -> takeBack() }
    :: atomic { open && (!bUp || bIncarnation != openIncarnation) && iState == AT_A -> open = false }
#ifdef CANCELS
    :: atomic { iState <= TENTATIVE ->
        iState = CANCELLED; asked = 0; cancelA();
        if
        :: open -> cancelB(openFor)
        :: else
        fi;
        open = false }
#endif
    od
}

proctype Clock() {
end:
    do
    :: atomic { frozenAsked[0] && !uF[0] -> uF[0] = true }
    :: atomic { frozenAsked[1] && !uF[1] -> uF[1] = true }
    od
}

/* Nothing moves any more. Ingress probes what is silent, a few times; then everything must be settled. */
byte probes = PROBES;
proctype Quiet() {
end:
    do
    :: atomic { timeout ->
        if
        :: iState == AT_A && probes > 0 -> probes--; asked = 0; askA()
        :: (iState == AT_B || iState == TENTATIVE) && probes > 0 -> probes--; asked = 0; askB(openFor)
        :: else ->
            assert(iState == FINISHED || iState == HANDS || iState == CANCELLED);
            assert(!aUp || (!ofSequence && !PINS)); /* no block leaked */
            assert(!bUp || (!taken[0] && !taken[1]));
            assert(aSeq == GONE || aSeq == DONE);
            break
        fi }
    od
}

init {
    atomic { run Ingress(); run A(); run B(); run S(); run T(); run Clock(); run Quiet() }
}
