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

/* What may be done, or nothing */
#define WHEN(condition, ...) if :: condition -> __VA_ARGS__ :: else fi

/* --- the network: kinds of messages. REFUSED: the target does not have it and will not; UNKNOWN: T cannot say */

mtype = {
    LEASE, LEASED, LEASE_NO, FREEZE, FROZEN, FREEZE_NO, END_MOVED, END_THAW, ALLOT, ALLOTTED, ALLOT_NO, PREPARE,
    PREPARED, PULL, PULLED, COMMIT, COMMITTED, REFUSED, UNKNOWN, ABORT, RESERVE, RESERVED, RESERVE_NO, READ,
    READ_DONE, READ_NO, UNRESERVE, SUBMIT, ACCEPTED, SUBMIT_NO, CANCEL_B, RESEND_B, FORGOT_B
};
#define MOVED 34 /* + incarnation */
#define CANCEL_A (MOVED + 2)
#define RESEND_A (CANCEL_A + 1)
#define FORGOT_A (RESEND_A + 1)
#define TOKEN_A (FORGOT_A + 1) /* + index */
#define RESENT_A (TOKEN_A + N) /* + tokens that A has */
#define TOKEN_B (RESENT_A + N + 1) /* + N * incarnation + index */
#define RESENT_B (TOKEN_B + 2 * N) /* + tokens that B has */
#define KINDS (RESENT_B + N + 1)

#ifdef DOUBLED_KIND
#define DOUBLED(m) ((m) == DOUBLED_KIND)
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

bool frozenAsked; /* S has asked for the freeze: its clock runs */
bool uL;          /* B's deadline of the lease has passed */
bool uF;          /* B's deadline of the freeze has passed; S's passes later, A's later still */

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
byte aSeq = RUN, aTokens;
byte lease;    /* NONE, ON, OVER */
byte frozenAt; /* tokens when it was frozen: what the submission carries, and each chunk and SequenceMoved tell */
byte blocks;   /* generation of the sequence's blocks: rises when they are freed, for others may use them then */
byte leasedBlocks;
bool ofSequence = true, pinned;
byte preemptions = PREEMPT;

inline freeIfUnused() { WHEN(!ofSequence && !pinned, blocks++) }
inline unpin() {
    assert(pinned); /* freed once */
    pinned = false;
    lease = OVER
}
inline letGo() {
    assert(ofSequence);
    ofSequence = false
}
/* What ends or is preempted loses its leases at once */
inline loseLeases() { WHEN(lease == ON, unpin()) }
inline decodeA() {
    send(TOKEN_A + aTokens);
    aTokens++;
    WHEN(aTokens == N, aSeq = DONE; letGo(); loseLeases(); freeIfUnused())
}

inline onLease() {
    if
    :: aSeq == RUN && lease == NONE -> lease = ON; pinned = true; leasedBlocks = blocks; send(LEASED)
#ifdef M_LEASE_AGAIN
    :: aSeq == RUN && lease == OVER -> lease = ON; pinned = true; uL = false; send(LEASED)
#endif
    :: lease == ON -> send(LEASED)
    :: else -> send(LEASE_NO)
    fi
}
inline onFreeze() {
    if
    :: aSeq == RUN && lease == ON -> aSeq = STILL; frozenAt = aTokens; send(FROZEN)
#ifdef M_LAPSED_LEASE
    :: aSeq == RUN && lease == OVER -> aSeq = STILL; frozenAt = aTokens; lease = ON; pinned = true; send(FROZEN)
#endif
    :: aSeq == STILL -> send(FROZEN)
    :: else -> send(FREEZE_NO)
    fi
}
inline thaw() {
    if
    :: lease == ON -> unpin()
    :: lease == NONE -> lease = OVER
    :: else
    fi;
    WHEN(aSeq == STILL, aSeq = RUN);
    freeIfUnused()
}
inline onEndMoved() {
    if
    :: aSeq == STILL -> aSeq = GONE; letGo(); unpin(); freeIfUnused()
    :: aSeq == GONE && lease == ON -> unpin(); freeIfUnused()
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

proctype A() {
end:
    do
    :: atomic { aUp && aSeq == RUN -> decodeA() }
    :: atomic { aUp && aSeq == RUN && preemptions > 0 ->
        preemptions--; aSeq = WAIT; letGo(); loseLeases(); freeIfUnused() }
    :: atomic { aUp && aSeq == WAIT -> aSeq = RUN; ofSequence = true }
    :: atomic { aUp && ARRIVES(LEASE); onLease() }
    :: atomic { aUp && ARRIVES(FREEZE); onFreeze() }
    :: atomic { aUp && ARRIVES(END_THAW); thaw() }
    :: atomic { aUp && ARRIVES(END_MOVED); onEndMoved() }
    :: atomic { aUp && lease == ON && aSeq == RUN -> uL = true; unpin(); freeIfUnused() /* lapses */ }
#ifndef M_NO_THAW
    :: atomic { aUp && aSeq == STILL && uF -> thaw() }
#endif
    :: atomic { aUp && lease == ON && aSeq == GONE && uF -> unpin(); freeIfUnused() }
    :: atomic { aUp && ARRIVES(CANCEL_A); onCancelA() }
    :: atomic { aUp && ARRIVES(RESEND_A);
        if
        :: aSeq == GONE -> send(FORGOT_A)
        :: else -> send(RESENT_A + aTokens)
        fi }
#ifdef CRASH_A
    :: atomic { aUp -> aUp = false; aSeq = GONE; ofSequence = false; pinned = false }
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
byte room;   /* NONE, ON, OVER: reservations */
bool taken;  /* blocks are reserved or used */
bool reading;
byte pulled; /* the full blocks in the reservation */
byte bSeq;   /* NONE, LOADING, or one of those below */
byte bTokens;
bool cached;
#define B_RUN 2
#define B_DONE 3
#define B_GONE 4

byte iState, iEpoch = 1, epochMax = 1; /* of ingress, see there */
byte epochOf; /* allotted by ingress, carried by the messages of the migration */

inline giveBack() {
    WHEN(room == ON, assert(taken); taken = false; reading = false; pulled = ABSENT);
    room = OVER
}
inline endB(how) {
    assert(taken);
    taken = false;
    bSeq = how
}
/* What is read is right if the blocks were not freed before the read ended */
inline looked(what) {
    if
    :: !aUp -> what = ABSENT
    :: aUp && blocks == leasedBlocks && (ofSequence || pinned) -> what = GOOD
    :: aUp && !(blocks == leasedBlocks && (ofSequence || pinned)) -> what = BAD
    fi
}
inline readEnds() {
    reading = false;
    if
#ifndef M_LATE_READ
    :: uL -> pulled = ABSENT
    :: !uL -> looked(pulled)
#else
    :: true -> looked(pulled)
#endif
    fi;
    if
    :: pulled == ABSENT -> send(READ_NO)
    :: else -> send(READ_DONE)
    fi;
#ifdef M_CACHED_EARLY
    cached = true
#endif
}
inline onRead() {
    if
    :: room == ON && pulled == ABSENT -> reading = true
#ifdef M_READ_AGAIN
    :: room == ON && pulled != ABSENT -> reading = true
#else
    :: room == ON && pulled != ABSENT -> send(READ_DONE)
#endif
    :: else -> send(READ_NO)
    fi
}
inline onSubmit() {
    if
    :: bSeq == NONE && epochOf > bFence ->
        bSeq = LOADING; bFence = epochOf; bTokens = frozenAt;
        reading = false;
        WHEN(room != ON, pulled = ABSENT); /* recomputed from the tokens that came along */
        room = OVER; taken = true
#ifdef M_TOLD_EARLY
        ; send(ACCEPTED); send(MOVED + bIncarnation)
#endif
    :: bSeq == B_RUN || bSeq == B_DONE -> send(ACCEPTED)
    :: bSeq == LOADING -> skip /* answered when it has been read */
    :: else -> send(SUBMIT_NO)
    fi
}
byte tail;
inline loaded() {
    if
#ifndef M_LATE_READ
    :: uF -> tail = ABSENT
    :: !uF -> looked(tail)
#else
    :: true -> looked(tail)
#endif
    fi;
    assert(pulled != BAD && tail != BAD); /* never decoded from */
    tail = 0;
    pulled = ABSENT;
    bSeq = B_RUN;
    assert(!(iState == HANDS && iEpoch == epochOf)); /* one decoder per epoch */
#ifndef M_TOLD_EARLY
    send(ACCEPTED);
    send(MOVED + bIncarnation)
#endif
}
inline onCancelB() {
    WHEN(epochOf > bFence, bFence = epochOf);
    if
    :: bSeq == LOADING || bSeq == B_RUN -> endB(B_GONE)
    :: bSeq == B_DONE -> bSeq = B_GONE
    :: else
    fi
}
inline decodeB() {
    send(TOKEN_B + N * bIncarnation + bTokens);
    bTokens++;
    WHEN(bTokens == N, endB(B_DONE))
}

proctype B() {
end:
    do
    :: atomic { bUp && bSeq == B_RUN -> decodeB() }
    :: atomic { bUp && ARRIVES(RESERVE);
        if
        :: room == NONE -> room = ON; taken = true; send(RESERVED)
        :: room == ON -> send(RESERVED)
        :: else -> send(RESERVE_NO)
        fi }
    :: atomic { bUp && room == ON -> giveBack() /* no news for too long */ }
    :: atomic { bUp && ARRIVES(UNRESERVE); giveBack() }
    :: atomic { bUp && ARRIVES(READ); onRead() }
    :: atomic { bUp && reading -> readEnds() }
    :: atomic { bUp && ARRIVES(SUBMIT); onSubmit() }
    :: atomic { bUp && bSeq == LOADING -> loaded() }
    :: atomic { bUp && ARRIVES(CANCEL_B); onCancelB() }
    :: atomic { bUp && ARRIVES(RESEND_B);
        if
        :: bSeq == NONE || bSeq == B_GONE -> send(FORGOT_B)
        :: else -> send(RESENT_B + bTokens)
        fi }
    :: atomic { bUp && cached && pulled == BAD -> assert(false) /* another request finds it */ }
#ifdef CRASH_B
    :: atomic { bUp && bIncarnation == 0 ->
        bUp = false; taken = false; reading = false; bSeq = NONE; room = NONE; pulled = ABSENT;
        bFence = 0; bTokens = 0 }
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

byte sStep;

inline giveUp() {
    send(ABORT);
    send(END_THAW);
    sStep = S_OVER
}
inline next(from, to, m) { WHEN(sStep == from, sStep = to; send(m)) } /* else it is late */
inline refusedAt(from) { WHEN(sStep == from, giveUp()) }

bool sUp = true;
proctype S() {
end:
    do
    :: atomic { sUp && sStep == S_IDLE -> sStep = S_LEASE; send(LEASE) }
    :: atomic { sUp && sStep >= S_LEASE && sStep <= S_FREEZE -> giveUp() /* unanswered */ }
#ifdef M_EARLY_THAW
    :: atomic { sUp && sStep == S_COMMIT -> giveUp() }
#else
    :: atomic { sUp && sStep == S_COMMIT && uF -> giveUp() }
#endif
    :: atomic { sUp && ARRIVES(LEASED); next(S_LEASE, S_ALLOT, ALLOT) }
    :: atomic { sUp && ARRIVES(LEASE_NO); refusedAt(S_LEASE) }
    :: atomic { sUp && ARRIVES(ALLOTTED); next(S_ALLOT, S_PREPARE, PREPARE) }
    :: atomic { sUp && ARRIVES(ALLOT_NO); refusedAt(S_ALLOT) }
    :: atomic { sUp && ARRIVES(PREPARED); next(S_PREPARE, S_PULL, PULL) }
    :: atomic { sUp && ARRIVES(PULLED);
        WHEN(sStep == S_PULL, sStep = S_FREEZE; frozenAsked = true; send(FREEZE)) }
    :: atomic { sUp && ARRIVES(FROZEN); next(S_FREEZE, S_COMMIT, COMMIT) }
    :: atomic { sUp && ARRIVES(FREEZE_NO); refusedAt(S_FREEZE) }
    :: atomic { sUp && ARRIVES(COMMITTED); next(S_COMMIT, S_OVER, END_MOVED) }
    :: atomic { sUp && ARRIVES(UNKNOWN); /* after a commit only the deadline ends the freeze */
        WHEN(sStep == S_PREPARE || sStep == S_PULL, refusedAt(sStep)) }
    :: atomic { sUp && ARRIVES(REFUSED);
        WHEN(sStep == S_PREPARE || sStep == S_PULL || sStep == S_COMMIT, refusedAt(sStep)) }
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
byte tStep;

inline closeT() {
    tStep = T_OVER;
    send(UNRESERVE)
}

proctype T() {
end:
    do
    :: atomic { tUp && ARRIVES(PREPARE);
        if
        :: tStep == T_NONE -> tStep = T_RESERVE; send(RESERVE)
        :: tStep == T_READY -> send(PREPARED)
        :: tStep == T_OVER -> send(REFUSED)
        :: else
        fi }
    :: atomic { tUp && ARRIVES(RESERVED); WHEN(tStep == T_RESERVE, tStep = T_READY; send(PREPARED)) }
    :: atomic { tUp && ARRIVES(RESERVE_NO); WHEN(tStep == T_RESERVE, tStep = T_OVER; send(REFUSED)) }
    :: atomic { tUp && ARRIVES(PULL);
        if
        :: tStep == T_READY -> tStep = T_READ; send(READ)
        :: tStep == T_PULLED -> send(PULLED)
        :: tStep == T_NONE || tStep == T_OVER -> send(REFUSED)
        :: else
        fi }
    :: atomic { tUp && ARRIVES(READ_DONE); WHEN(tStep == T_READ, tStep = T_PULLED; send(PULLED)) }
    :: atomic { tUp && ARRIVES(READ_NO); WHEN(tStep == T_READ, closeT(); send(REFUSED)) }
    :: atomic { tUp && ARRIVES(COMMIT);
        if
        :: tStep == T_PULLED -> tStep = T_SUBMIT; send(SUBMIT)
        :: tStep == T_COMMITTED -> send(COMMITTED)
        :: tStep == T_OVER -> send(REFUSED)
#ifdef M_UNKNOWN_IS_NO
        :: tStep == T_NONE -> send(REFUSED)
#else
        :: tStep == T_NONE -> send(UNKNOWN)
#endif
        :: tStep == T_UNSURE -> send(UNKNOWN)
        :: else
        fi }
    :: atomic { tUp && ARRIVES(ACCEPTED);
        WHEN(tStep == T_SUBMIT || tStep == T_UNSURE, tStep = T_COMMITTED; send(COMMITTED)) }
    :: atomic { tUp && ARRIVES(SUBMIT_NO); WHEN(tStep == T_SUBMIT, closeT(); send(REFUSED)) }
    :: atomic { tUp && ARRIVES(ABORT);
        if
        :: tStep == T_NONE -> tStep = T_OVER
        :: tStep >= T_RESERVE && tStep <= T_PULLED -> closeT()
        :: else
        fi }
    :: atomic { tUp && (tStep == T_RESERVE || tStep == T_READ) -> closeT(); send(REFUSED) }
    :: atomic { tUp && (tStep == T_READY || tStep == T_PULLED) -> closeT() /* no news */ }
    :: atomic { tUp && tStep == T_SUBMIT -> tStep = T_UNSURE; send(UNKNOWN) }
#ifdef CRASH_T
    :: atomic { tUp && !tRestarted -> tUp = false; tStep = T_NONE }
#ifdef RESTART
    :: atomic { !tUp && !tRestarted -> tUp = true; tRestarted = true }
#endif
#endif
    od
}

/* --- ingress: owner of the token log, and judge */

byte known;     /* tokens in the log */
byte ofA;       /* how many of them, from the first on, are A's */
byte restEpoch; /* what epoch the others were decoded in */
bool open;      /* there is an allotment */
byte openIncarnation;
byte asked;     /* 0, 1: A is asked to resend, 2: B */
byte misjudgements = MISJUDGE;
bool allotted;

inline cancelA() { WHEN(net[CANCEL_A] == 0, send(CANCEL_A)) }
inline cancelB() { WHEN(net[CANCEL_B] == 0, send(CANCEL_B)) }
inline ended() { WHEN(known == N, iState = FINISHED) }
inline appendA() {
    assert(ofA == known); /* its history is the log */
    known++;
    ofA++
}
inline appendB() {
    if
    :: known < frozenAt -> appendA()
    :: else ->
        assert(ofA == frozenAt && (known == ofA || restEpoch == iEpoch));
        restEpoch = iEpoch;
        known++
    fi
}
inline askA() { WHEN(asked != 1, asked = 1; send(RESEND_A)) }
inline askB() { WHEN(asked != 2, asked = 2; send(RESEND_B)) }
inline takeBack() {
    epochMax++;
    iEpoch = epochMax;
    iState = HANDS;
    asked = 0;
    cancelA();
    WHEN(open, cancelB());
    open = false;
    assert(!(bSeq == B_RUN && epochOf == iEpoch)) /* one decoder per epoch */
}
inline lostA() {
    if
    :: open -> iState = TENTATIVE; cancelA(); asked = 0; askB()
    :: else -> takeBack()
    fi
}
inline judge(base) {
    if
    :: known <= base -> iState = AT_B; iEpoch = epochOf; asked = 0; cancelA()
    :: known > base && iState == AT_A -> open = false; cancelB()
    :: known > base && iState == TENTATIVE -> takeBack()
    fi
}
/* B speaks in an epoch that ingress knows and has not voided */
#define HEARD(inc) (open && openIncarnation == inc && iState <= TENTATIVE)

inline onMoved(inc) {
    if
    :: HEARD(inc) && iState != AT_B ->
        judge(frozenAt);
        WHEN(iState == AT_B && known < frozenAt, askB())
    :: HEARD(inc) && iState == AT_B -> skip
    :: else -> cancelB()
    fi
}
#ifdef M_BASE_IS_FIRST
#define BASE(i) i
#else
#define BASE(i) frozenAt
#endif
inline onTokenB(inc, i) {
    if
    :: HEARD(inc) ->
        WHEN(iState != AT_B, judge(BASE(i)));
        if
        :: iState == AT_B && i == known -> appendB(); ended()
        :: iState == AT_B && i > known -> askB()
        :: else
        fi
    :: else -> cancelB()
    fi
}
inline onResentB(count) {
    if
    :: asked == 2 && open ->
        asked = 0;
        WHEN(iState == TENTATIVE, judge(frozenAt));
        do
        :: iState == AT_B && known < count -> appendB()
        :: else -> break
        od;
        WHEN(iState == AT_B, ended())
    :: else
    fi
}
inline onForgotB() { WHEN(asked == 2 && open && (iState == AT_B || iState == TENTATIVE), takeBack()) }
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
        WHEN(iState == AT_A, ended())
    :: else
    fi
}
inline onAllot() {
    if
    :: iState != AT_A || allotted && !open -> send(ALLOT_NO)
    :: iState == AT_A && open -> send(ALLOTTED)
    :: iState == AT_A && !allotted ->
        allotted = true;
#ifdef M_NO_ALLOTMENT
        epochOf = iEpoch + 1;
#else
        epochMax++;
        epochOf = epochMax;
#endif
        open = true; openIncarnation = bIncarnation;
        send(ALLOTTED)
    fi
}

#define TOKENS_B(inc) \
    :: atomic { ARRIVES(MOVED + inc); onMoved(inc) } \
    :: atomic { ARRIVES(TOKEN_B + N * inc + 0); onTokenB(inc, 0) } \
    :: atomic { ARRIVES(TOKEN_B + N * inc + 1); onTokenB(inc, 1) } \
    IF3(:: atomic { ARRIVES(TOKEN_B + N * inc + 2); onTokenB(inc, 2) })

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
    :: atomic { ARRIVES(FORGOT_A); WHEN(asked == 1 && iState == AT_A, asked = 0; lostA()) }
    TOKENS_B(0)
#ifdef RESTART
    TOKENS_B(1)
#endif
    :: atomic { ARRIVES(RESENT_B + 0); onResentB(0) }
    :: atomic { ARRIVES(RESENT_B + 1); onResentB(1) }
    :: atomic { ARRIVES(RESENT_B + 2); onResentB(2) }
    IF3(:: atomic { ARRIVES(RESENT_B + 3); onResentB(3) })
    :: atomic { ARRIVES(FORGOT_B); onForgotB() }
    :: atomic { ARRIVES(ALLOT); onAllot() }
    :: atomic { !aUp && iState == AT_A -> lostA() }
    :: atomic { misjudgements > 0 && iState == AT_A -> misjudgements--; lostA() }
    :: atomic { open && (!bUp || bIncarnation != openIncarnation) && (iState == AT_B || iState == TENTATIVE) -> takeBack() }
    :: atomic { open && (!bUp || bIncarnation != openIncarnation) && iState == AT_A -> open = false }
#ifdef CANCELS
    :: atomic { iState <= TENTATIVE ->
        iState = CANCELLED; asked = 0; cancelA();
        WHEN(open, cancelB());
        open = false }
#endif
    od
}

proctype Clock() {
end:
    do
    :: atomic { frozenAsked && !uF -> uF = true }
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
        :: (iState == AT_B || iState == TENTATIVE) && probes > 0 -> probes--; asked = 0; askB()
        :: else ->
            assert(iState == FINISHED || iState == HANDS || iState == CANCELLED);
            assert(!aUp || (!ofSequence && !pinned)); /* no block leaked */
            assert(!bUp || !taken);
            assert(aSeq == GONE || aSeq == DONE);
            break
        fi }
    od
}

init {
    atomic { run Ingress(); run A(); run B(); run S(); run T(); run Clock(); run Quiet() }
}
