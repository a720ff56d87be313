// NCCL of the stand-in: ranks are threads of one process, each on a GPU of its own. It does what the documentation of
// NCCL promises, and no more:
//
// - Every communicator is non-blocking. A call is begun when it returns, and done when ncclCommGetAsyncError says so,
//   which is only at the second look; work comes into its stream then, and the handle of a part is written then. A
//   communicator that is used before that is a fault.
// - A collective runs when it is next in a stream of every rank; a message, when both ends are. Ranks in different
//   collectives, or with messages of different lengths, wait until they are aborted.
// - An abort ends the work of one rank, and not that of the others. What is used after its end, or destroyed before it
//   was finalized, is a fault.
#include <cmath>
#include <memory>

namespace {
enum : Result { NCCL_INVALID_ARGUMENT = 4, NCCL_INVALID_USAGE = 5, NCCL_IN_PROGRESS = 7 };

struct Config { size_t size; unsigned magic, version; int blocking, cluster, min, max; const char *net; int share; };
struct UniqueId { char bytes[128]; };

// One end of a message that is next in its stream.
struct Letter { uint64_t at; size_t bytes; Context *of; bool done = false; };
typedef std::shared_ptr<Letter> Sent;

struct Part { int kind, type, op, root; uint64_t from, to; size_t count; Context *of; };
struct Collective { std::map<int, Part> parts; bool done = false; };
struct Member;
struct Split { std::map<int, std::array<int, 2>> asked; bool made = false; std::map<int, std::shared_ptr<Member>> children; };

struct Comm {
    int size;
    Result failed = OK;
    std::map<int, std::shared_ptr<Member>> members;
    std::deque<Collective> collectives; // from the first on
    std::map<std::array<int, 2>, std::array<std::deque<Sent>, 2>> letters; // by sender and receiver: sent, and awaited
    std::deque<Split> splits;
};

// A rank's end. What it was asked to do that is not done: whether that can be, and how; and the looks until then.
struct Member {
    std::shared_ptr<Comm> comm;
    int rank;
    Context *of;
    std::function<bool()> can;
    std::function<Result()> later;
    int looks = 0, queued = 0;
    size_t collectives = 0, splits = 0;
    bool aborted = false, finalized = false;
};
typedef std::shared_ptr<Member> End;

std::map<void *, End> &ends = *new std::map<void *, End>; // by handle
std::map<std::string, std::shared_ptr<Comm>> &named = *new std::map<std::string, std::shared_ptr<Comm>>;

std::string communicators() { return ", " + std::to_string(ends.size()) + " communicators"; }

Result wrong(const std::string &why, Result code = NCCL_INVALID_USAGE) {
    report("NCCL: " + why);
    return code;
}

bool configured(const Config *config) {
    return config && config->size == sizeof(Config) && config->magic == 0xcafebeef && config->version >= 21800 && !config->blocking;
}

// The end behind a handle, of the current GPU and done with what it was asked before.
Result idle(void *handle, End &end) {
    if (!current) return 1; // ncclUnhandledCudaError
    auto found = ends.find(handle);
    if (found == ends.end()) return wrong("a handle that is not alive", NCCL_INVALID_ARGUMENT);
    end = found->second;
    if (end->looks) return wrong("a communicator that is used while a call of it is in progress");
    if (end->of != current) return wrong("a communicator of another GPU");
    if (end->finalized) return wrong("a communicator that is used after it was finalized");
    return end->comm->failed;
}

Result begin(const End &end, std::function<Result()> later, std::function<bool()> can = [] { return true; }) {
    end->looks = 2, end->later = later, end->can = can;
    return NCCL_IN_PROGRESS;
}

float half(uint16_t bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float size = exponent == 31 ? (fraction ? NAN : INFINITY) : exponent ? std::ldexp(1024.f + fraction, exponent - 25) : std::ldexp((float)fraction, -24);
    return bits >> 15 ? -size : size;
}
// To the nearest, of two the even one.
uint16_t to_half(float value) {
    uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    float size = std::fabs(value);
    if (std::isnan(size)) return sign | 0x7e00;
    if (size >= 65520.f) return sign | 0x7c00;
    int exponent;
    std::frexp(size, &exponent);
    int unit = std::max(exponent - 11, -24); // the last bit is 2^unit
    int fraction = (int)std::nearbyint(std::ldexp(size, -unit));
    return sign | (size < std::ldexp(1.f, -14) ? fraction : ((unit + 24) << 10) + fraction);
}
float wide(uint16_t bits) { uint32_t all = (uint32_t)bits << 16; float value; memcpy(&value, &all, 4); return value; }
uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return std::isnan(value) ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

template <typename T> T reduced(T a, T b, int op) { return op == 0 ? (T)(a + b) : op == 2 ? (b > a ? b : a) : (b < a ? b : a); }
int32_t added(int32_t a, int32_t b) { return (int32_t)((uint32_t)a + (uint32_t)b); }
int64_t added(int64_t a, int64_t b) { return (int64_t)((uint64_t)a + (uint64_t)b); }
template <typename T> void combine(char *a, const char *b, size_t count, int op) {
    for (size_t i = 0; i < count; i++) {
        T x, y;
        memcpy(&x, a + i * sizeof(T), sizeof(T)), memcpy(&y, b + i * sizeof(T), sizeof(T));
        if constexpr (std::is_same_v<T, int32_t> || std::is_same_v<T, int64_t>) x = op == 0 ? added(x, y) : reduced(x, y, op);
        else x = reduced(x, y, op);
        memcpy(a + i * sizeof(T), &x, sizeof(T));
    }
}
template <typename Read, typename Write> void combine_16(char *a, const char *b, size_t count, int op, Read read, Write write) {
    for (size_t i = 0; i < count; i++) {
        auto x = (uint16_t *)a + i;
        *x = write(reduced(read(*x), read(((const uint16_t *)b)[i]), op));
    }
}
size_t size_of(int type) { return type == 1 ? 1 : type == 6 || type == 9 ? 2 : type == 4 || type == 8 ? 8 : 4; }
void combine_all(char *a, const char *b, size_t count, int type, int op) {
    if (type == 1) combine<uint8_t>(a, b, count, op);
    if (type == 2) combine<int32_t>(a, b, count, op);
    if (type == 4) combine<int64_t>(a, b, count, op);
    if (type == 6) combine_16(a, b, count, op, half, to_half);
    if (type == 7) combine<float>(a, b, count, op);
    if (type == 8) combine<double>(a, b, count, op);
    if (type == 9) combine_16(a, b, count, op, wide, to_bf16);
}

enum { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST };

bool agree(std::map<int, Part> &parts) {
    Part &first = parts[0];
    for (auto &[rank, part] : parts)
        if (part.kind != first.kind || part.type != first.type || part.count != first.count || part.op != first.op || part.root != first.root) return false;
    return true;
}

// Runs a collective that all ranks have come to.
Result collective(std::map<int, Part> &parts) {
    Part &first = parts[0];
    size_t bytes = first.count * size_of(first.type), n = parts.size();
    bool reduces = first.kind <= REDUCE_SCATTER, gathers = first.kind == ALL_GATHER;
    size_t in = first.kind == REDUCE_SCATTER ? n * bytes : bytes, out = gathers ? n * bytes : bytes;
    std::string all;
    for (auto &[rank, part] : parts) {
        if ((in && !lies(part.from, in, part.of)) || (out && !lies(part.to, out, part.of))) return wrong("memory of another GPU", ILLEGAL_ADDRESS);
        std::string own((const char *)part.from, in);
        if (gathers) all += own;
        else if (first.kind == BROADCAST) all = rank == first.root ? own : all;
        else if (all.empty()) all = own;
        else combine_all(&all[0], own.data(), in / size_of(first.type), first.type, first.op);
    }
    for (auto &[rank, part] : parts) memcpy((void *)part.to, all.data() + (reduces && in != out ? rank * out : 0), out);
    return OK;
}

void note(Result result) { if (result && !fault) fault = result; }

// Brings work of an end into a stream: `comes` is asked until the others are there.
Result put(const End &end, void *stream, std::function<bool()> comes) {
    end->queued++;
    auto ready = [=] { return end->aborted || comes(); };
    return push(stream, [=] { end->queued--; return OK; }, nullptr, ready) ? 1 : OK;
}

Result queue_part(void *handle, Part part, void *stream) {
    ENTER;
    End end;
    if (Result refused = idle(handle, end)) return refused;
    if (part.root < 0 || part.root >= end->comm->size) return wrong("there is no such rank", NCCL_INVALID_ARGUMENT);
    part.of = current;
    // A graph that has it begins another collective whenever it is launched: the number is of the copy that is queued.
    return begin(end, [=] {
        return put(end, stream, [=, number = (long)-1]() mutable {
            auto &all = end->comm->collectives;
            if (number < 0) {
                number = end->collectives++;
                while (all.size() <= (size_t)number) all.emplace_back();
                all[number].parts[end->rank] = part;
                if ((int)all[number].parts.size() == end->comm->size && agree(all[number].parts)) {
                    note(collective(all[number].parts));
                    all[number].done = true;
                    queued.notify_all();
                }
            }
            return all[number].done;
        });
    });
}

struct Asked { bool sends; uint64_t at; size_t bytes; int peer; };
thread_local int depth = 0;
thread_local std::vector<std::pair<void *, Asked>> grouped;
thread_local void *grouped_stream = nullptr;

void deliver(Comm &comm, std::array<int, 2> pair) {
    auto &[sent, awaited] = comm.letters[pair];
    while (!sent.empty() && !awaited.empty()) {
        auto from = sent.front(), to = awaited.front();
        sent.pop_front(), awaited.pop_front();
        if (from->bytes != to->bytes) continue;
        if (!lies(from->at, from->bytes, from->of) || !lies(to->at, to->bytes, to->of)) note(wrong("memory of another GPU", ILLEGAL_ADDRESS));
        else memcpy((void *)to->at, (const void *)from->at, to->bytes);
        from->done = to->done = true;
        queued.notify_all();
    }
}

Result message(bool sends, const void *at, size_t count, int type, int peer, void *handle, void *stream) {
    if (!depth) return wrong("a message outside of a group: two ranks that both send first would wait for ever");
    ENTER;
    End end;
    if (Result refused = idle(handle, end)) return refused;
    if (peer < 0 || peer >= end->comm->size) return wrong("there is no such rank", NCCL_INVALID_ARGUMENT);
    if (!grouped.empty() && (grouped[0].first != handle || grouped_stream != stream)) return wrong("a group of several communicators or streams");
    grouped.push_back({handle, {sends, (uint64_t)at, count * size_of(type), peer}}), grouped_stream = stream;
    return OK;
}
} // namespace

C ncclGetVersion(int *version) { *version = setting("STAND_IN_NCCL", 22809); return OK; }
extern "C" const char *ncclGetErrorString(Result) { return "says the stand-in"; }
extern "C" const char *ncclGetLastError(void *) { return ""; }
C ncclGetUniqueId(UniqueId *id) {
    ENTER;
    static int ids = 0;
    memset(id->bytes, 0, 128);
    snprintf(id->bytes, 128, "stand-in %d", ids++);
    named[id->bytes] = nullptr;
    return OK;
}
C ncclCommInitRankConfig(void **made, int size, UniqueId id, int rank, Config *config) {
    ENTER;
    if (!current) return 1;
    auto known = named.find(std::string(id.bytes, strnlen(id.bytes, 128)));
    if (known == named.end() || !configured(config) || rank < 0 || rank >= size) return wrong("an unknown id, rank or configuration", NCCL_INVALID_ARGUMENT);
    if (!known->second) known->second = std::make_shared<Comm>(), known->second->size = size;
    auto comm = known->second;
    auto end = std::make_shared<Member>();
    end->comm = comm, end->rank = rank, end->of = current;
    for (auto &[other, member] : comm->members) if (member->of == current) comm->failed = wrong("Duplicate GPU detected");
    if (comm->size != size || !comm->members.insert({rank, end}).second) return wrong("a rank joins twice, or another size", NCCL_INVALID_ARGUMENT);
    ends[*made = end.get()] = end;
    return begin(end, [] { return OK; }, [=] { return (int)comm->members.size() == size; });
}
C ncclCommSplit(void *of, int color, int key, void **made, Config *config) {
    ENTER;
    End end;
    if (Result refused = idle(of, end)) return refused;
    if (!configured(config)) return wrong("a configuration that it does not know", NCCL_INVALID_ARGUMENT);
    auto &splits = end->comm->splits;
    size_t number = end->splits++;
    while (splits.size() <= number) splits.emplace_back();
    splits[number].asked[end->rank] = {color, key};
    auto all_came = [=] { return (int)end->comm->splits[number].asked.size() == end->comm->size; };
    return begin(end, [=] {
        auto &split = end->comm->splits[number];
        if (!split.made) {
            std::map<int, std::map<std::array<int, 2>, int>> colors; // their ranks, by key and rank
            for (auto &[rank, asked] : split.asked) if (asked[0] >= 0) colors[asked[0]][{asked[1], rank}] = rank;
            for (auto &[color, ranks] : colors) {
                auto comm = std::make_shared<Comm>();
                comm->size = ranks.size();
                for (auto &[order, rank] : ranks) {
                    auto child = std::make_shared<Member>();
                    child->comm = comm, child->rank = comm->members.size(), child->of = end->comm->members[rank]->of;
                    comm->members[child->rank] = split.children[rank] = child;
                }
            }
            split.made = true;
        }
        auto child = split.children.find(end->rank);
        *made = child == split.children.end() ? nullptr : (void *)child->second.get();
        if (*made) ends[*made] = child->second, child->second->looks = 2, child->second->can = [] { return true; }, child->second->later = [] { return OK; };
        return OK;
    }, all_came);
}
C ncclCommCount(void *of, int *count) { ENTER; End end; Result refused = idle(of, end); if (!refused) *count = end->comm->size; return refused; }
C ncclCommUserRank(void *of, int *rank) { ENTER; End end; Result refused = idle(of, end); if (!refused) *rank = end->rank; return refused; }
C ncclCommGetAsyncError(void *of, Result *error) {
    ENTER;
    auto found = ends.find(of);
    if (!current || found == ends.end()) return wrong("a handle that is not alive", NCCL_INVALID_ARGUMENT);
    auto end = found->second;
    while (step()) {} // as a GPU does by itself
    if (end->looks > 1) end->looks--;
    else if (end->looks && end->can()) {
        end->looks = 0;
        auto later = std::move(end->later);
        if (Result result = later()) end->comm->failed = result;
    }
    *error = end->comm->failed ? end->comm->failed : end->looks ? (Result)NCCL_IN_PROGRESS : (Result)OK;
    return OK;
}
C ncclCommFinalize(void *of) {
    ENTER;
    End end;
    if (Result refused = idle(of, end)) return refused;
    return begin(end, [=] { end->finalized = true; return OK; }, [=] { return end->queued == 0; });
}
C ncclCommDestroy(void *of) {
    ENTER;
    auto found = ends.find(of);
    if (!current || found == ends.end()) return wrong("a communicator that is destroyed twice", NCCL_INVALID_ARGUMENT);
    if (!found->second->finalized) return wrong("a communicator that is destroyed before it was finalized");
    ends.erase(found);
    return OK;
}
C ncclCommAbort(void *of) {
    ENTER;
    auto found = ends.find(of);
    if (!current || found == ends.end()) return wrong("a communicator that is aborted after its end", NCCL_INVALID_ARGUMENT);
    found->second->aborted = true;
    ends.erase(found);
    queued.notify_all();
    return OK;
}
C ncclAllReduce(const void *from, void *to, size_t count, int type, int op, void *of, void *stream) {
    return queue_part(of, {ALL_REDUCE, type, op, 0, (uint64_t)from, (uint64_t)to, count, nullptr}, stream);
}
C ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, void *of, void *stream) {
    return queue_part(of, {REDUCE_SCATTER, type, op, 0, (uint64_t)from, (uint64_t)to, count, nullptr}, stream);
}
C ncclAllGather(const void *from, void *to, size_t count, int type, void *of, void *stream) {
    return queue_part(of, {ALL_GATHER, type, 0, 0, (uint64_t)from, (uint64_t)to, count, nullptr}, stream);
}
C ncclBroadcast(const void *from, void *to, size_t count, int type, int root, void *of, void *stream) {
    return queue_part(of, {BROADCAST, type, 0, root, (uint64_t)from, (uint64_t)to, count, nullptr}, stream);
}
C ncclSend(const void *from, size_t count, int type, int peer, void *of, void *stream) { return message(true, from, count, type, peer, of, stream); }
C ncclRecv(void *to, size_t count, int type, int peer, void *of, void *stream) { return message(false, to, count, type, peer, of, stream); }
C ncclGroupStart() { depth++; return OK; }
C ncclGroupEnd() {
    if (depth != 1) return depth = 0, wrong("a group that was not begun, or begun twice");
    depth = 0;
    auto all = std::move(grouped);
    grouped.clear();
    if (all.empty()) return OK;
    ENTER;
    End end;
    if (Result refused = idle(all[0].first, end)) return refused;
    return begin(end, [=, stream = grouped_stream, of = current] {
        return put(end, stream, [=, letters = std::vector<Sent>()]() mutable {
            if (letters.empty())
                for (auto &[handle, asked] : all) {
                    auto letter = std::make_shared<Letter>(Letter{asked.at, asked.bytes, of});
                    std::array<int, 2> pair = asked.sends ? std::array<int, 2>{end->rank, asked.peer} : std::array<int, 2>{asked.peer, end->rank};
                    letters.push_back(letter);
                    end->comm->letters[pair][asked.sends ? 0 : 1].push_back(letter);
                    deliver(*end->comm, pair);
                }
            for (auto &letter : letters) if (!letter->done) return false;
            return true;
        });
    });
}
