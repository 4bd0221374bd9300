// Our own declarations of the interface between NIXL 1.5.1 and a backend plugin: the layouts on
// x86-64 and the order of the virtual functions, as observed in the stock wheel. `probe.cpp` checks
// them against the running library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace abi {

using Params = std::unordered_map<std::string, std::string>;
using Notes = std::vector<std::pair<std::string, std::string>>;

enum class Mem : int { dram = 0, vram = 1, block = 2, object = 3, file = 4 };
enum class Op : int { read = 0, write = 1 };
enum class Sync : int { none = 0, strict = 1, rw = 2 };
enum class Cost : int { analytical = 0 };
using Mems = std::vector<Mem>;
// 0 for success, 1 for in progress, negative for an error.
using Status = int;

struct InitParams {
    std::string agent;
    std::string type;
    Params *params;
    bool progress_thread;
    std::uint64_t delay_us;
    Sync sync;
    bool telemetry;
};
static_assert(sizeof(InitParams) == 96 && offsetof(InitParams, params) == 64 &&
              offsetof(InitParams, delay_us) == 80 && offsetof(InitParams, telemetry) == 92);

struct Metadata {
    explicit Metadata(bool is_private) : is_private(is_private) {}
    Metadata(const Metadata &) = delete;
    Metadata &operator=(const Metadata &) = delete;
    virtual ~Metadata() = default;
    bool is_private;
};
static_assert(sizeof(Metadata) == 16);

struct Request {
    Request() = default;
    Request(const Request &) = delete;
    Request &operator=(const Request &) = delete;
    virtual ~Request() = default;
};
static_assert(sizeof(Request) == 8);

struct BasicDesc {
    std::uintptr_t address;
    std::size_t len;
    std::uint64_t device;
};
struct BlobDesc : BasicDesc {
    std::string blob;
};
struct MetaDesc : BasicDesc {
    Metadata *metadata;
};
static_assert(sizeof(BasicDesc) == 24 && sizeof(BlobDesc) == 56 && sizeof(MetaDesc) == 32);

// NIXL's list of descriptors. The plugin only reads it.
template <class Desc> struct List {
    void *table;
    Mem mem;
    std::vector<Desc> descs;
};
static_assert(sizeof(List<MetaDesc>) == 40 && offsetof(List<MetaDesc>, descs) == 16);

struct OptionalArgs {
    std::string note;
    bool has_note;
    std::string custom;
};
static_assert(sizeof(OptionalArgs) == 72 && offsetof(OptionalArgs, custom) == 40);

using Answer = std::optional<Params>;
static_assert(sizeof(Answer) == 64);
static_assert(sizeof(Params) == 56 && sizeof(Mems) == 24 && sizeof(Notes) == 24 &&
              sizeof(std::string) == 32);

// The base class of an engine. The declaration order of its virtual functions sets their slots in
// the vtable.
class Engine {
public:
    Engine(const Engine &) = delete;
    Engine &operator=(const Engine &) = delete;
    virtual ~Engine() = default;
    virtual bool supports_remote() const = 0;
    virtual bool supports_local() const = 0;
    virtual bool supports_notes() const = 0;
    virtual Mems supported_mems() const = 0;
    virtual Status register_memory(const BlobDesc &, const Mem &, Metadata *&) = 0;
    virtual Status deregister_memory(Metadata *) = 0;
    virtual Status connect(const std::string &) = 0;
    virtual Status disconnect(const std::string &) = 0;
    virtual Status unload(Metadata *) = 0;
    virtual Status prepare(const Op &, const List<MetaDesc> &, const List<MetaDesc> &,
                           const std::string &, Request *&, const OptionalArgs *) const = 0;
    virtual Status post(const Op &, const List<MetaDesc> &, const List<MetaDesc> &,
                        const std::string &, Request *&, const OptionalArgs *) const = 0;
    virtual Status check(Request *) const = 0;
    virtual Status release(Request *) const = 0;
    virtual Status prepare_remote_view(const void *, void *&, const OptionalArgs *) const;
    virtual Status prepare_view(const void *, void *&, const OptionalArgs *) const;
    virtual void release_view(void *) const;
    virtual Status public_data(const Metadata *, std::string &) const = 0;
    virtual Status connection_info(std::string &) const = 0;
    virtual Status load_connection_info(const std::string &, const std::string &) = 0;
    virtual Status load_remote(const BlobDesc &, const Mem &, const std::string &, Metadata *&) = 0;
    virtual Status load_local(Metadata *, Metadata *&) = 0;
    virtual Status take_notes(Notes &) = 0;
    virtual Status notify(const std::string &, const std::string &) const = 0;
    virtual Status query(const List<BlobDesc> &, std::vector<Answer> &) const;
    virtual Status estimate(const Op &, const List<MetaDesc> &, const List<MetaDesc> &,
                            const std::string &, Request *const &, std::int64_t &, std::int64_t &,
                            Cost &, const OptionalArgs *) const;

protected:
    explicit Engine(const InitParams &init)
        : type(init.type), params(*init.params), agent(init.agent), telemetry(init.telemetry) {}

    std::string type;
    Params params;
    std::vector<std::pair<std::uint64_t, std::uint64_t>> events;
    std::mutex events_lock;
    bool init_error = false;
    const std::string agent;
    const bool telemetry;
    friend struct Layout;
};

// NIXL's core reads these fields at fixed offsets.
struct Layout {
    static_assert(sizeof(Engine) == 208 && offsetof(Engine, type) == 8 &&
                  offsetof(Engine, params) == 40 && offsetof(Engine, events) == 96 &&
                  offsetof(Engine, events_lock) == 120 && offsetof(Engine, init_error) == 160 &&
                  offsetof(Engine, agent) == 168 && offsetof(Engine, telemetry) == 200);
};

// Number of vtable slots, including the two of the destructor.
inline constexpr std::size_t slots = 27;
inline constexpr int api_version = 1;

struct Plugin {
    int api_version;
    Engine *(*create)(const InitParams *);
    void (*destroy)(Engine *);
    const char *(*name)();
    const char *(*version)();
    Params (*options)();
    Mems (*mems)();
};
static_assert(sizeof(Plugin) == 56);

} // namespace abi
