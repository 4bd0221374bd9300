// The engines of a plugin, called as an agent of NIXL calls them: helpers of the tests.

#pragma once

#include "../plugin/abi.hpp"

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using namespace abi;

enum : Status {
    IN_PROG = 1, SUCCESS = 0, INVALID_PARAM = -2, NOT_FOUND = -4, MISMATCH = -5, NOT_ALLOWED = -6,
    REPOST_ACTIVE = -7, NOT_SUPPORTED = -9, REMOTE_DISCONNECT = -10,
};

#define IS(want, ...)                                                                              \
    do {                                                                                           \
        auto got_ = (__VA_ARGS__);                                                                 \
        if (!(got_ == (want))) {                                                                   \
            std::fprintf(stderr, "%s:%d: %s is %ld, not %ld\n", __FILE__, __LINE__,                \
                         #__VA_ARGS__, long(got_), long(want));                                    \
            std::exit(1);                                                                          \
        }                                                                                          \
    } while (0)

inline Plugin *plugin;
inline Params given = {{"fabric", "off"}, {"device", "off"}};

struct Closes {
    void operator()(Engine *engine) const { plugin->destroy(engine); }
};
using Agent = std::unique_ptr<Engine, Closes>;

inline Agent create(const std::string &name, Params params = given, bool thread = false) {
    InitParams init{name, "FISHPLATE", &params, thread, 100, Sync::none, false};
    return Agent(plugin->create(&init));
}

template <class Holds> void until(const char *what, Holds holds) {
    auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!holds()) {
        if (std::chrono::steady_clock::now() > end) {
            std::fprintf(stderr, "timeout while waiting for %s\n", what);
            std::exit(1);
        }
        std::this_thread::yield();
    }
}

// Memory of an agent, with its metadata.
struct Memory {
    Engine &owner;
    std::vector<char> bytes;
    Metadata *local = nullptr;
    BlobDesc desc;

    Memory(Engine &owner, std::size_t size) : owner(owner), bytes(size) {
        desc.address = reinterpret_cast<std::uintptr_t>(bytes.data());
        desc.len = size, desc.device = 0;
        IS(SUCCESS, owner.register_memory(desc, Mem::dram, local));
    }
    // Returns the descriptor that a peer loads.
    BlobDesc told() const {
        BlobDesc out = desc;
        IS(SUCCESS, owner.public_data(local, out.blob));
        return out;
    }
    MetaDesc at(std::size_t offset, std::size_t len, Metadata *metadata) const {
        MetaDesc out;
        out.address = desc.address + offset, out.len = len, out.device = 0, out.metadata = metadata;
        return out;
    }
};

inline List<MetaDesc> list(std::vector<MetaDesc> descs, Mem mem = Mem::dram) {
    return {nullptr, mem, std::move(descs)};
}

inline std::string info(Engine &engine) {
    std::string out;
    IS(SUCCESS, engine.connection_info(out));
    return out;
}

inline Status prepare(Engine &engine, Op op, const List<MetaDesc> &ours,
                      const List<MetaDesc> &theirs, const std::string &name, Request *&request) {
    request = nullptr;
    return engine.prepare(op, ours, theirs, name, request, nullptr);
}

inline Status post(Engine &engine, Request *request, const std::string *note = nullptr) {
    static const List<MetaDesc> none = list({});
    OptionalArgs args{note == nullptr ? "" : *note, note != nullptr, ""};
    return engine.post(Op::write, none, none, "", request, &args);
}

inline Status finish(Engine &engine, Request *request, Status status) {
    until("a transfer",
          [&] { return status != IN_PROG || (status = engine.check(request)) != IN_PROG; });
    return status;
}

inline Notes notes(Engine &engine, std::size_t count) {
    Notes found;
    until("notifications", [&] {
        IS(SUCCESS, engine.take_notes(found));
        return found.size() >= count;
    });
    IS(count, found.size());
    return found;
}
