// Blocks of threads on one thread of the host: fibers, barriers, warps, and how a launch ends badly.
//
// Owns: scheduling. A warp's lanes run one after the other until each waits or has ended; a warp operation is performed when all 32
// lanes wait for the same one; a barrier opens when every thread of the block waits at the same line. Anything else is an error that
// names the kernel. Must never: let a thread continue past a barrier that another has not reached.

#include <csetjmp>
#include <csignal>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <utility>
#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emu {

constexpr unsigned MOST_THREADS = 1024, WARP = 32, PAGE = 4096, STACK = 64 * 1024, MOST_COPIES = 256;
constexpr int FAILED = 1000;
constexpr size_t MOST_SHARED = 256 * 1024;

enum class State : uint8_t { Ready, Barrier, Warp, Done };
enum class Op : uint8_t { Sync, ShuffleXor, Shuffle, Ballot, MmaBf16, MmaF16 };
inline const char* name_of(Op op) {
    const char* names[] = {"warp_sync", "shuffle_xor", "shuffle", "ballot", "mma_bf16", "mma_f16"};
    return names[int(op)];
}

// An asynchronous copy that was begun; `group` counts commits.
struct Copy { void* to; const void* from; unsigned group; };

struct Fiber {
    void* stack;        // null until it starts
#if defined(__x86_64__)
    void* sp;
#else
    ucontext_t context;
#endif
    unsigned x;
    State state;
    Op op;
    int line;
    uint32_t value, result;
    int lane;           // what a shuffle asks for
    float* d;
    const uint32_t *a, *b;
    unsigned group, copies_len;
    Copy copies[MOST_COPIES];
};

struct Index { unsigned x, y, z; };

// What the host hands over; `order` is 0 for ascending threads and blocks, 1 for descending, else the seed of a shuffle.
struct Launch {
    const char* kernel;
    void (*call)(void**);
    unsigned grid[3];
    unsigned threads, shared;
    void** args;
    unsigned long long order;
};

struct Machine {
    Fiber* fibers = nullptr;
    char* stacks = nullptr;
    char* shared = nullptr;     // MOST_SHARED bytes before a page that cannot be touched
    void* free_stacks[MOST_THREADS];
    unsigned free_len = 0;
    const Launch* launch = nullptr;
    Fiber* self = nullptr;
#if defined(__x86_64__)
    void* scheduler = nullptr;
#else
    ucontext_t scheduler;
#endif
    Index block, grid;
    char* dynamic = nullptr;
    uint8_t lanes[WARP], warps[WARP];
    char* error; size_t error_len;
    sigjmp_buf escape;
    volatile bool running = false;
    void* volatile fault = nullptr;

    bool prepare() {
        if (stacks) return true;
        auto map = [](size_t bytes) {
            void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            return at == MAP_FAILED ? nullptr : (char*)at;
        };
        fibers = (Fiber*)map(sizeof(Fiber) * MOST_THREADS);
        shared = map(MOST_SHARED + PAGE);
        stacks = map(size_t(STACK) * MOST_THREADS);
        if (!fibers || !shared || !stacks) return false;
        mprotect(shared + MOST_SHARED, PAGE, PROT_NONE);
        for (unsigned i = 0; i < MOST_THREADS; i++) mprotect(stacks + size_t(STACK) * i, PAGE, PROT_NONE);
        return true;
    }
    ~Machine() {
        if (fibers) munmap(fibers, sizeof(Fiber) * MOST_THREADS);
        if (shared) munmap(shared, MOST_SHARED + PAGE);
        if (stacks) munmap(stacks, size_t(STACK) * MOST_THREADS);
    }
};

static thread_local Machine machine;

// ---- switching

#if defined(__x86_64__)
extern "C" __attribute__((visibility("hidden"))) void emu_switch(void** save, void* load);
asm(R"(
    .text
    .hidden emu_switch
    .globl emu_switch
    .type emu_switch, @function
emu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size emu_switch, .-emu_switch
)");
static void leave(Fiber* fiber) { emu_switch(&fiber->sp, machine.scheduler); }
#else
static void leave(Fiber* fiber) { swapcontext(&fiber->context, &machine.scheduler); }
#endif

static void entry() {
    Fiber* fiber = machine.self;
    machine.launch->call(machine.launch->args);
    fiber->state = State::Done;
    leave(fiber);
}

static void resume(Fiber* fiber) {
    machine.self = fiber;
    if (!fiber->stack) {
        // The stack of a thread that has ended is warm.
        fiber->stack = machine.free_stacks[--machine.free_len];
#if defined(__x86_64__)
        void** top = (void**)((char*)fiber->stack + STACK);
        top[-1] = nullptr;
        top[-2] = (void*)entry;
        fiber->sp = top - 8;
#else
        getcontext(&fiber->context);
        fiber->context.uc_stack = {};
        fiber->context.uc_stack.ss_sp = (char*)fiber->stack + PAGE;
        fiber->context.uc_stack.ss_size = STACK - PAGE;
        fiber->context.uc_link = nullptr;
        makecontext(&fiber->context, entry, 0);
#endif
    }
#if defined(__x86_64__)
    emu_switch(&machine.scheduler, fiber->sp);
#else
    swapcontext(&machine.scheduler, &fiber->context);
#endif
    if (fiber->state == State::Done) machine.free_stacks[machine.free_len++] = fiber->stack;
}

// What a thread calls to wait.
static __attribute__((noinline)) void wait(State state, int line) {
    Fiber* fiber = machine.self;
    fiber->state = state;
    fiber->line = line;
    leave(fiber);
}

// ---- failing

static const char* what(const Fiber& fiber, char* text, size_t len) {
    switch (fiber.state) {
    case State::Done: snprintf(text, len, "has ended"); break;
    case State::Barrier: snprintf(text, len, "waits at the barrier of line %d", fiber.line); break;
    default: snprintf(text, len, "waits in %s of line %d", name_of(fiber.op), fiber.line);
    }
    return text;
}

static bool diverged(const Fiber& one, const Fiber& other) {
    char a[64], b[64];
    const Index& at = machine.block;
    snprintf(machine.error, machine.error_len, "block (%u, %u, %u): thread %u %s, thread %u %s", at.x, at.y, at.z, one.x,
             what(one, a, sizeof a), other.x, what(other, b, sizeof b));
    return false;
}

// Ends the launch from within a thread.
[[noreturn]] static void fail(const char* why, int line) {
    const Index& at = machine.block;
    snprintf(machine.error, machine.error_len, "block (%u, %u, %u), thread %u, line %d: %s", at.x, at.y, at.z, machine.self->x,
             line, why);
    siglongjmp(machine.escape, FAILED);
}

// ---- warp operations

static double bf16(uint32_t bits) {
    float value;
    bits <<= 16;
    memcpy(&value, &bits, 4);
    return value;
}

static double f16(uint32_t bits) {
    int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    double size = exponent == 0 ? std::ldexp(mantissa, -24)
                : exponent == 31 ? (mantissa ? NAN : INFINITY)
                : std::ldexp(1024 + mantissa, exponent - 25);
    return bits & 0x8000 ? -size : size;
}

// D += A * B of 16x16 and 16x8: the products of the step are summed in f64 over ascending k, then added to the accumulator and
// rounded once.
template <double (*value)(uint32_t)> static void mma(Fiber* lanes) {
    double a[16][16], b[16][8], d[16][8] = {};
    for (unsigned lane = 0; lane < WARP; lane++) {
        unsigned g = lane / 4, c = lane % 4 * 2;
        for (unsigned half = 0; half < 2; half++) {
            unsigned shift = 16 * half;
            a[g][c + half] = value(lanes[lane].a[0] >> shift & 0xffff);
            a[g + 8][c + half] = value(lanes[lane].a[1] >> shift & 0xffff);
            a[g][c + 8 + half] = value(lanes[lane].a[2] >> shift & 0xffff);
            a[g + 8][c + 8 + half] = value(lanes[lane].a[3] >> shift & 0xffff);
            b[c + half][g] = value(lanes[lane].b[0] >> shift & 0xffff);
            b[c + 8 + half][g] = value(lanes[lane].b[1] >> shift & 0xffff);
        }
    }
    for (unsigned i = 0; i < 16; i++)
        for (unsigned k = 0; k < 16; k++)
            for (unsigned j = 0; j < 8; j++) d[i][j] += a[i][k] * b[k][j];
    for (unsigned lane = 0; lane < WARP; lane++) {
        unsigned g = lane / 4, c = lane % 4 * 2;
        float* out = lanes[lane].d;
        out[0] = float(out[0] + d[g][c]);
        out[1] = float(out[1] + d[g][c + 1]);
        out[2] = float(out[2] + d[g + 8][c]);
        out[3] = float(out[3] + d[g + 8][c + 1]);
    }
}

static void perform(Fiber* lanes) {
    switch (lanes[0].op) {
    case Op::Sync: break;
    case Op::ShuffleXor:
        for (unsigned lane = 0; lane < WARP; lane++) lanes[lane].result = lanes[(lane ^ unsigned(lanes[lane].lane)) % WARP].value;
        break;
    case Op::Shuffle:
        for (unsigned lane = 0; lane < WARP; lane++) lanes[lane].result = lanes[unsigned(lanes[lane].lane) % WARP].value;
        break;
    case Op::Ballot: {
        uint32_t all = 0;
        for (unsigned lane = 0; lane < WARP; lane++) all |= (lanes[lane].value != 0 ? 1u : 0u) << lane;
        for (unsigned lane = 0; lane < WARP; lane++) lanes[lane].result = all;
        break;
    }
    case Op::MmaBf16: mma<bf16>(lanes); break;
    case Op::MmaF16: mma<f16>(lanes); break;
    }
}

// What a thread calls to take part in one.
static __attribute__((noinline)) uint32_t warp(Op op, uint32_t value, int lane, int line) {
    Fiber* fiber = machine.self;
    fiber->op = op;
    fiber->value = value;
    fiber->lane = lane;
    wait(State::Warp, line);
    return fiber->result;
}

// ---- scheduling

// Until every lane waits at a barrier or has ended.
static bool run_warp(Fiber* lanes) {
    for (;;) {
        unsigned waiting = 0;
        for (unsigned i = 0; i < WARP; i++) {
            Fiber* fiber = &lanes[machine.lanes[i]];
            if (fiber->state == State::Ready) resume(fiber);
            waiting += fiber->state == State::Warp;
        }
        if (waiting == 0) return true;
        for (unsigned i = 1; i < WARP; i++)
            if (lanes[i].state != lanes[0].state || lanes[i].line != lanes[0].line || lanes[i].op != lanes[0].op)
                return diverged(lanes[0], lanes[i]);
        perform(lanes);
        for (unsigned i = 0; i < WARP; i++) lanes[i].state = State::Ready;
    }
}

static bool run_block() {
    unsigned threads = machine.launch->threads;
    Fiber* fibers = machine.fibers;
    for (unsigned i = 0; i < threads; i++) {
        fibers[i].stack = nullptr;
        fibers[i].x = i;
        fibers[i].state = State::Ready;
        fibers[i].group = fibers[i].copies_len = 0;
    }
    memset(machine.dynamic, 0xff, machine.launch->shared);
    for (;;) {
        for (unsigned i = 0; i < threads / WARP; i++)
            if (!run_warp(fibers + WARP * machine.warps[i])) return false;
        for (unsigned i = 1; i < threads; i++)
            if (fibers[i].state != fibers[0].state || (fibers[0].state == State::Barrier && fibers[i].line != fibers[0].line))
                return diverged(fibers[0], fibers[i]);
        if (fibers[0].state == State::Done) return true;
        for (unsigned i = 0; i < threads; i++) fibers[i].state = State::Ready;
    }
}

static uint64_t random(uint64_t& state) {
    state += 0x9e3779b97f4a7c15;
    uint64_t x = state;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

static void arrange(uint8_t* order, unsigned len, uint64_t how, uint64_t& state) {
    for (unsigned i = 0; i < len; i++) order[i] = uint8_t(how == 1 ? len - 1 - i : i);
    if (how > 1)
        for (unsigned i = len; i > 1; i--) std::swap(order[i - 1], order[random(state) % i]);
}

static bool run_blocks() {
    const Launch& launch = *machine.launch;
    uint64_t count = uint64_t(launch.grid[0]) * launch.grid[1] * launch.grid[2], state = launch.order;
    uint64_t first = launch.order > 1 ? random(state) % count : 0;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t at = launch.order == 1 ? count - 1 - i : (first + i) % count;
        machine.block = {unsigned(at % launch.grid[0]), unsigned(at / launch.grid[0] % launch.grid[1]),
                         unsigned(at / launch.grid[0] / launch.grid[1])};
        arrange(machine.lanes, WARP, launch.order, state);
        arrange(machine.warps, launch.threads / WARP, launch.order, state);
        if (!run_block()) return false;
    }
    return true;
}

// ---- faults: a touched guard page ends the launch, not the process

static struct sigaction former[3];
static const int SIGNALS[3] = {SIGSEGV, SIGBUS, SIGFPE};

static void on_fault(int signal, siginfo_t* info, void* context) {
    if (machine.running) {
        machine.fault = info->si_addr;
        siglongjmp(machine.escape, signal);
    }
    for (int i = 0; i < 3; i++) {
        if (SIGNALS[i] != signal) continue;
        if (former[i].sa_flags & SA_SIGINFO) return former[i].sa_sigaction(signal, info, context);
        sigaction(signal, &former[i], nullptr);    // the default, when the instruction is tried again
    }
}

static bool watch() {
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < 3; i++) sigaction(SIGNALS[i], &action, &former[i]);
    return true;
}

// ---- kernels by name

template <class T> struct Kind;
template <class T> struct Kind<T*> { static constexpr char value = 'p'; };
template <> struct Kind<uint32_t> { static constexpr char value = 'u'; };
template <> struct Kind<float> { static constexpr char value = 'f'; };

template <class F> struct Kernel;
template <class... A> struct Kernel<void (*)(A...)> {
    static constexpr char signature[] = {Kind<A>::value..., 0};
    template <size_t... I> static void expand(void (*f)(A...), void** args, std::index_sequence<I...>) {
        f(*(A*)args[I]...);
    }
    static void invoke(void (*f)(A...), void** args) { expand(f, args, std::index_sequence_for<A...>()); }
};

struct Entry { const char* name; const char* signature; void (*call)(void**); };
#define EMU_KERNEL(f) {#f, emu::Kernel<decltype(&f)>::signature, [](void** args) { emu::Kernel<decltype(&f)>::invoke(&f, args); }}

}  // namespace emu

// 0: done. -1: `error` says what was wrong. Else the signal that ended it, and `fault` the address.
extern "C" __attribute__((visibility("default"))) int emu_launch(const emu::Launch* launch, char* error, size_t error_len,
                                                                 void** fault) {
    using namespace emu;
    static const bool watching = watch();
    (void)watching;
    machine.error = error;
    machine.error_len = error_len;
    if (!machine.prepare()) {
        snprintf(error, error_len, "no memory for the stacks of %u threads", MOST_THREADS);
        return -1;
    }
    machine.launch = launch;
    machine.grid = {launch->grid[0], launch->grid[1], launch->grid[2]};
    machine.dynamic = machine.shared + MOST_SHARED - (launch->shared + 15) / 16 * 16;
    for (unsigned i = 0; i < MOST_THREADS; i++) machine.free_stacks[i] = machine.stacks + size_t(STACK) * i;
    machine.free_len = MOST_THREADS;
    int signal = sigsetjmp(machine.escape, 1);
    if (signal) {
        machine.running = false;
        if (signal == FAILED) return -1;
        *fault = machine.fault;
        snprintf(error, error_len, "block (%u, %u, %u), thread %u", machine.block.x, machine.block.y, machine.block.z,
                 machine.self->x);
        return signal;
    }
    machine.running = true;
    bool done = run_blocks();
    machine.running = false;
    return done ? 0 : -1;
}
