// Calls a plugin as NIXL does, with two engines in one process. Tests results and statuses, and
// wrong calls.
//
//     engine libplugin_FISHPLATE.so [refused | NAME=VALUE...]
//
// "refused" only checks that the plugin creates no agent in this process.
// NAME=VALUE sets a parameter of the agents. By default they use shared memory only.

#include "agent.hpp"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <memory>
#include <numeric>
#include <sys/socket.h>
#include <sys/un.h>
#include <thread>
#include <unistd.h>

namespace {

void the_table() {
    IS(api_version, plugin->api_version);
    IS(0, std::strcmp(plugin->name(), "FISHPLATE"));
    IS(true, plugin->mems().at(0) == Mem::dram);
    IS(1u, plugin->options().count("fabric"));
}

void what_cannot_be_created() {
    Params params;
    InitParams good{"a", "FISHPLATE", &params, false, 0, Sync::none, false};
    alignas(InitParams) char zeros[sizeof(InitParams)] = {};
    IS(nullptr, plugin->create(reinterpret_cast<InitParams *>(zeros)));
    IS(nullptr, plugin->create(nullptr));
    good.sync = static_cast<Sync>(7);
    IS(nullptr, plugin->create(&good));
    good.sync = Sync::none;
    // Passes strings instead of the map of parameters.
    std::string other[2] = {"other", "fields"};
    good.params = reinterpret_cast<Params *>(other);
    IS(nullptr, plugin->create(&good));
    IS(true, create("a", {{"speed", "high"}}) == nullptr);
    IS(true, create("a", {{"fabric", "copper"}}) == nullptr);
    IS(true, create("a", {{"shared_memory", "maybe"}}) == nullptr);
    IS(true, create("a", {{"device", "cuda"}}) == nullptr);
    IS(true, create("a", {{"device", "cuda:9999"}, {"fabric", "off"}}) == nullptr);
}

void wrong_metadata(Engine &a, Engine &b, const Memory &theirs) {
    std::string good = info(b), bad = good;
    IS(INVALID_PARAM, a.load_connection_info("b", ""));
    IS(INVALID_PARAM, a.load_connection_info("b", good.substr(0, 20)));
    bad[0] = 'X';
    IS(INVALID_PARAM, a.load_connection_info("b", bad));
    bad[0] = good[0], bad[4] = 77;
    IS(MISMATCH, a.load_connection_info("b", bad));
    Metadata *metadata = nullptr;
    BlobDesc told = theirs.told();
    IS(NOT_FOUND, a.load_remote(told, Mem::dram, "b", metadata));
    IS(SUCCESS, a.load_connection_info("b", good));
    IS(SUCCESS, a.load_connection_info("b", good));
    IS(NOT_ALLOWED, a.load_connection_info("b", info(a)));
    IS(NOT_ALLOWED, a.load_connection_info("a", good));
    IS(NOT_SUPPORTED, a.load_remote(told, Mem::file, "b", metadata));
    IS(MISMATCH, a.load_remote(told, Mem::vram, "b", metadata));
    std::string region = told.blob;
    told.blob = "nonsense";
    IS(INVALID_PARAM, a.load_remote(told, Mem::dram, "b", metadata));
    told.blob = region, told.blob[4] = 77;
    IS(MISMATCH, a.load_remote(told, Mem::dram, "b", metadata));
    IS(true, metadata == nullptr);
}

void wrong_memory(Engine &a) {
    Metadata *metadata = nullptr;
    BlobDesc desc;
    desc.address = 4096, desc.len = 0, desc.device = 0;
    IS(INVALID_PARAM, a.register_memory(desc, Mem::dram, metadata));
    desc.address = 0, desc.len = 8;
    IS(INVALID_PARAM, a.register_memory(desc, Mem::dram, metadata));
    desc.address = UINTPTR_MAX - 3;
    IS(INVALID_PARAM, a.register_memory(desc, Mem::dram, metadata));
    IS(NOT_SUPPORTED, a.register_memory(desc, Mem::file, metadata));
    // These agents have no device.
    IS(NOT_SUPPORTED, a.register_memory(desc, Mem::vram, metadata));
    IS(1u, a.supported_mems().size());
    IS(INVALID_PARAM, a.deregister_memory(nullptr));
}

void wrong_calls(Engine &a, const Memory &ours, const Memory &theirs, Metadata *remote) {
    Request *request = nullptr;
    auto from = [&](std::size_t at, std::size_t len) {
        return list({ours.at(at, len, ours.local)});
    };
    auto to = [&](std::size_t at, std::size_t len) { return list({theirs.at(at, len, remote)}); };
    auto size = ours.bytes.size();
    auto refused = [&](Status want, const List<MetaDesc> &local, const List<MetaDesc> &distant,
                       const char *name = "b") {
        IS(want, prepare(a, Op::write, local, distant, name, request));
        IS(true, request == nullptr);
    };
    refused(INVALID_PARAM, list({}), list({}));
    refused(INVALID_PARAM, from(0, 8), list({}));
    refused(INVALID_PARAM, from(size - 7, 8), to(0, 8));
    refused(INVALID_PARAM, from(0, 8), to(size - 7, 8));
    refused(INVALID_PARAM, from(0, 8), to(std::size_t(0) - 8, 8));
    refused(INVALID_PARAM, from(0, SIZE_MAX), to(0, SIZE_MAX));
    refused(MISMATCH, from(0, 8), to(0, 9));
    refused(NOT_FOUND, from(0, 8), to(0, 8), "nobody");
    refused(NOT_FOUND, list({ours.at(0, 8, nullptr)}), to(0, 8));
    refused(NOT_FOUND, from(0, 8), list({theirs.at(0, 8, nullptr)}));
    // Remote memory passed as local memory, and the reverse.
    refused(NOT_FOUND, list({theirs.at(0, 8, remote)}), from(0, 8), "a");
    refused(NOT_SUPPORTED, list({ours.at(0, 8, ours.local)}, Mem::file), to(0, 8));
    IS(INVALID_PARAM, post(a, nullptr));
    IS(INVALID_PARAM, a.check(nullptr));
    IS(NOT_FOUND, a.connect("nobody"));
    IS(NOT_FOUND, a.disconnect("nobody"));
    IS(NOT_FOUND, a.notify("nobody", "?"));
    IS(SUCCESS, a.connect("a"));
    IS(SUCCESS, a.disconnect("a"));
    void *view = nullptr;
    IS(NOT_SUPPORTED, a.prepare_view(nullptr, view, nullptr));
    IS(NOT_SUPPORTED, a.prepare_remote_view(nullptr, view, nullptr));
    std::vector<Answer> answers;
    IS(NOT_SUPPORTED, a.query({nullptr, Mem::dram, {}}, answers));
    std::int64_t micros;
    Cost cost;
    IS(NOT_SUPPORTED,
       a.estimate(Op::read, from(0, 8), to(0, 8), "b", request, micros, micros, cost, nullptr));
}

void transfers(Engine &a, Engine &b, Memory &ours, Memory &theirs, Metadata *remote) {
    Request *request = nullptr;
    std::iota(ours.bytes.begin(), ours.bytes.end(), char(1));
    // 100,000 ranges of 0 to 2 bytes with gaps in between.
    std::vector<MetaDesc> from, to;
    for (std::size_t at = 0; at < 100000; at++) {
        from.push_back(ours.at(at * 4, at % 3, ours.local));
        to.push_back(theirs.at(at * 3 + 1, at % 3, remote));
    }
    IS(SUCCESS, prepare(a, Op::write, list(from), list(to), "b", request));
    std::string note;
    IS(SUCCESS, finish(a, request, post(a, request, &note)));
    IS(0u, notes(b, 1)[0].second.size());
    for (std::size_t at = 0; at < 100000; at++)
        IS(0, std::memcmp(theirs.bytes.data() + at * 3 + 1, ours.bytes.data() + at * 4, at % 3));
    IS(0, theirs.bytes[0]);
    // Post again, with a long notification.
    note.assign(3 << 20, 'n');
    std::memset(theirs.bytes.data(), 0, theirs.bytes.size());
    IS(SUCCESS, finish(a, request, post(a, request, &note)));
    Status done = SUCCESS;
    Notes found;
    until("the long one", [&] {
        done = a.take_notes(found);
        IS(SUCCESS, b.take_notes(found));
        return !found.empty();
    });
    IS(SUCCESS, done);
    IS(true, found.size() == 1 && found[0] == std::make_pair(std::string("a"), note));
    IS(ours.bytes[8], theirs.bytes[7]);
    IS(SUCCESS, a.release(request));
    // A read, and a transfer within the agent.
    std::iota(theirs.bytes.begin(), theirs.bytes.end(), char(7));
    IS(SUCCESS, prepare(a, Op::read, list({ours.at(5, 1000, ours.local)}),
                        list({theirs.at(9, 1000, remote)}), "b", request));
    note = "read";
    IS(SUCCESS, finish(a, request, post(a, request, &note)));
    IS(0, std::memcmp(ours.bytes.data() + 5, theirs.bytes.data() + 9, 1000));
    IS(0, note.compare(notes(b, 1)[0].second));
    IS(SUCCESS, a.release(request));
    Metadata *own = nullptr;
    IS(SUCCESS, a.load_local(ours.local, own));
    IS(SUCCESS, prepare(a, Op::write, list({ours.at(0, 100, own)}), list({ours.at(500, 100, own)}),
                        "a", request));
    IS(SUCCESS, post(a, request, &note));
    IS(0, std::memcmp(ours.bytes.data(), ours.bytes.data() + 500, 100));
    IS(0, notes(a, 1)[0].first.compare("a"));
    IS(SUCCESS, a.release(request));
    IS(SUCCESS, a.unload(own));
    // Notifications arrive in order.
    for (char c = 'a'; c <= 'z'; c++)
        IS(SUCCESS, a.notify("b", std::string(c == 'm' ? 100000 : 1, c)));
    std::string all;
    until("26 notifications", [&] {
        Notes some;
        IS(SUCCESS, a.take_notes(some));
        IS(SUCCESS, b.take_notes(some));
        for (auto &[name, text] : some) all += text[0];
        return all.size() >= 26;
    });
    IS(0, all.compare("abcdefghijklmnopqrstuvwxyz"));
}

// Sends more long notifications than an agent receives at once, and a notification that is too
// long.
void long_notifications(Engine &a, Engine &b) {
    IS(INVALID_PARAM, a.notify("b", std::string((64 << 20) + 1, 'x')));
    constexpr std::size_t count = 100, size = 1200000;
    for (std::size_t n = 0; n < count; n++)
        IS(SUCCESS, a.notify("b", std::string(size + n, char(n))));
    std::size_t found = 0;
    until("long notifications", [&] {
        Notes some;
        IS(SUCCESS, a.take_notes(some));
        IS(SUCCESS, b.take_notes(some));
        for (auto &[name, text] : some) {
            IS(size + found, text.size());
            IS(true, text.find_first_not_of(char(found)) == std::string::npos);
            found++;
        }
        return found >= count;
    });
}

// The peer does not answer. Transfers stay in progress, and can be released in that state.
void what_is_in_progress(Engine &a, const Memory &ours) {
    Agent silent = create("silent");
    Memory theirs(*silent, 4096);
    std::string told = info(*silent);
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    const std::uint64_t door = 0x1000000000000000 + getpid();
    std::memcpy(told.data() + 22, &door, sizeof door);
    // Removes the addresses for other hosts.
    told.erase(33, 4 * static_cast<unsigned char>(told[32]));
    told[32] = 0;
    int len = std::snprintf(name.sun_path + 1, 64, "fishplate-nixl-%016lx", door);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    IS(0, bind(fd, reinterpret_cast<sockaddr *>(&name), sizeof name.sun_family + 1 + len));
    IS(0, listen(fd, 1));
    IS(SUCCESS, a.load_connection_info("silent", told));
    Metadata *remote = nullptr;
    IS(SUCCESS, a.load_remote(theirs.told(), Mem::dram, "silent", remote));
    Request *request = nullptr;
    IS(SUCCESS, prepare(a, Op::write, list({ours.at(0, 8, ours.local)}),
                        list({theirs.at(0, 8, remote)}), "silent", request));
    IS(IN_PROG, post(a, request));
    IS(IN_PROG, a.check(request));
    IS(REPOST_ACTIVE, post(a, request));
    IS(SUCCESS, a.release(request));
    IS(SUCCESS, prepare(a, Op::write, list({ours.at(0, 8, ours.local)}),
                        list({theirs.at(0, 8, remote)}), "silent", request));
    IS(IN_PROG, post(a, request));
    close(fd);
    IS(REMOTE_DISCONNECT, finish(a, request, IN_PROG));
    IS(REMOTE_DISCONNECT, finish(a, request, post(a, request)));
    IS(REMOTE_DISCONNECT, a.connect("silent"));
    IS(SUCCESS, a.release(request));
    IS(SUCCESS, a.unload(remote));
    IS(SUCCESS, a.disconnect("silent"));
    IS(SUCCESS, silent->deregister_memory(theirs.local));
}

// NIXL destroys an agent without releasing its requests. AddressSanitizer finds what stays
// allocated.
void an_agent_with_live_requests() {
    // Over a network, writes need the target's progress.
    Agent a = create("a"), b = create("b", given, !given.contains("fabric"));
    IS(SUCCESS, a->load_connection_info("b", info(*b)));
    Memory ours(*a, 4096), theirs(*b, 4096);
    Metadata *remote = nullptr;
    IS(SUCCESS, a->load_remote(theirs.told(), Mem::dram, "b", remote));
    Request *requests[4];
    for (Request *&request : requests)
        IS(SUCCESS, prepare(*a, Op::write, list({ours.at(0, 8, ours.local)}),
                            list({theirs.at(0, 8, remote)}), "b", request));
    // One request is done, one may be in progress, and two are released in between.
    IS(SUCCESS, finish(*a, requests[0], post(*a, requests[0])));
    post(*a, requests[3]);
    IS(SUCCESS, a->release(requests[1]));
    IS(SUCCESS, a->release(requests[2]));
    a->deregister_memory(ours.local);
    IS(SUCCESS, a->unload(remote));
    a.reset();
    IS(SUCCESS, b->deregister_memory(theirs.local));
}

// Threads post, check and notify concurrently, as NIXL's RW mode allows.
void several_threads(Engine &a, Engine &b, Memory &ours, Memory &theirs, Metadata *remote) {
    constexpr std::size_t threads = 4, rounds = 50, part = 80000;
    auto move = [&](std::size_t thread) {
        std::vector<MetaDesc> from, to;
        for (std::size_t at = 0; at < 20; at++) {
            // Short ranges, and a long one.
            std::size_t len = at == 0 ? 40000 : 100 + at,
                        place = thread * part + (at == 0 ? 0 : 40000 + at * 1000);
            from.push_back(ours.at(place, len, ours.local));
            to.push_back(theirs.at(place, len, remote));
        }
        Request *request[2] = {};
        IS(SUCCESS, prepare(a, Op::write, list(from), list(to), "b", request[0]));
        IS(SUCCESS, prepare(a, Op::read, list(from), list(to), "b", request[1]));
        for (std::size_t round = 0; round < rounds; round++) {
            char *first = ours.bytes.data() + thread * part;
            std::memset(first, char(thread * rounds + round), part);
            std::string note(1, char(thread));
            IS(SUCCESS, finish(a, request[0], post(a, request[0], &note)));
            IS(SUCCESS, a.notify("b", note));
            std::memset(first, 0, part);
            IS(SUCCESS, finish(a, request[1], post(a, request[1])));
            for (auto &desc : from)
                for (std::size_t at = 0; at < desc.len; at++)
                    IS(char(thread * rounds + round), reinterpret_cast<char *>(desc.address)[at]);
        }
        IS(SUCCESS, a.release(request[0]));
        IS(SUCCESS, a.release(request[1]));
    };
    std::vector<std::thread> all;
    for (std::size_t thread = 0; thread < threads; thread++) all.emplace_back(move, thread);
    for (auto &thread : all) thread.join();
    std::size_t each[threads] = {}, count = 0;
    until("the notifications of all threads", [&] {
        Notes some;
        IS(SUCCESS, a.take_notes(some));
        IS(SUCCESS, b.take_notes(some));
        for (auto &[name, text] : some) each[std::size_t(text[0])]++;
        return (count += some.size()) >= 2 * threads * rounds;
    });
    for (std::size_t found : each) IS(2 * rounds, found);
}

// A long copy is exact, and calls of another thread are served while it runs.
void long_copies(Engine &a, Engine &b) {
    constexpr std::size_t size = 32 << 20, middle = (20 << 20) + 1, part = 5000;
    Memory ours(a, size), mine(a, size), theirs(b, size);
    Metadata *remote = nullptr;
    IS(SUCCESS, a.load_remote(theirs.told(), Mem::dram, "b", remote));
    std::vector<MetaDesc> here, there, within;
    auto add = [&](std::size_t at, std::size_t len) {
        here.push_back(ours.at(at, len, ours.local));
        there.push_back(theirs.at(at, len, remote));
        within.push_back(mine.at(at, len, mine.local));
    };
    add(0, middle);
    for (std::size_t at = middle + 1; at + part < size; at += part) add(at, part - 1);
    Request *short_one = nullptr, *request[3] = {};
    IS(SUCCESS, prepare(a, Op::write, list({ours.at(0, 8, ours.local)}),
                        list({theirs.at(0, 8, remote)}), "b", short_one));
    IS(SUCCESS, finish(a, short_one, post(a, short_one)));
    IS(SUCCESS, prepare(a, Op::write, list(here), list(there), "b", request[0]));
    IS(SUCCESS, prepare(a, Op::read, list(within), list(there), "b", request[1]));
    IS(SUCCESS, prepare(a, Op::write, list(within), list(here), "a", request[2]));
    std::atomic<std::size_t> calls = 0;
    // The first and the last byte of the current copy. They change from 0 when it begins and ends.
    std::atomic<char *> first = nullptr, last = nullptr;
    std::atomic<bool> ends = false;
    auto set = [](char *byte) { return byte != nullptr && std::atomic_ref(*byte) != 0; };
    std::thread other([&] {
        while (!ends) {
            char *end = last;
            bool begun = set(first);
            IS(SUCCESS, a.check(short_one));
            calls += begun && end != nullptr && end == last && !set(end);
        }
    });
    std::string note = "n";
    for (Request *one : request) {
        std::size_t shared = 0, round = 0;
        until("calls during five copies", [&] {
            // The short ranges leave a byte between them.
            char value = char(++round % 100 + 1);
            bool writes = one == request[0];
            Memory &source = writes ? ours : one == request[1] ? theirs : mine;
            Memory &target = writes ? theirs : one == request[1] ? mine : ours;
            std::memset(source.bytes.data(), value, size);
            std::memset(target.bytes.data(), 0, size);
            last = target.bytes.data() + (here.back().address - ours.desc.address),
            first = target.bytes.data();
            calls = 0;
            IS(SUCCESS, post(a, one, round == 1 && writes ? &note : nullptr));
            first = nullptr, last = nullptr;
            shared += calls >= 3;
            for (auto &desc : here) {
                const char *got = target.bytes.data() + (desc.address - ours.desc.address);
                IS(true, std::count(got, got + desc.len, value) == long(desc.len));
                IS(0, got[desc.len]);
            }
            return shared >= 5;
        });
        IS(SUCCESS, a.release(one));
    }
    ends = true;
    other.join();
    IS(true, notes(b, 1)[0].second == note);
    IS(SUCCESS, a.release(short_one));
    IS(SUCCESS, a.unload(remote));
    for (auto &[engine, memory] : {std::pair{&a, &ours}, {&a, &mine}, {&b, &theirs}})
        IS(SUCCESS, engine->deregister_memory(memory->local));
}

void what_is_gone(Engine &a, Agent &b, Memory &ours, Metadata *remote, Memory &theirs) {
    Request *request = nullptr, *other = nullptr;
    auto there = list({theirs.at(0, 64, remote)});
    {
        Memory passing(a, 4096);
        IS(SUCCESS,
           prepare(a, Op::write, list({passing.at(0, 64, passing.local)}), there, "b", request));
        IS(SUCCESS, finish(a, request, post(a, request)));
        IS(SUCCESS, a.deregister_memory(passing.local));
        IS(NOT_FOUND, finish(a, request, post(a, request)));
        IS(SUCCESS, a.release(request));
    }
    IS(SUCCESS, prepare(a, Op::write, list({ours.at(0, 64, ours.local)}), there, "b", request));
    auto two = [&](const Memory &of, Metadata *metadata) {
        return list({of.at(0, 9, metadata), of.at(20, 9, metadata)});
    };
    IS(SUCCESS, prepare(a, Op::read, two(ours, ours.local), two(theirs, remote), "b", other));
    IS(SUCCESS, b->deregister_memory(theirs.local));
    if (!given.contains("fabric")) {
        // Without a network, the target's process reports its deregistered memory.
        IS(NOT_FOUND, finish(a, request, post(a, request)));
        IS(NOT_FOUND, finish(a, other, post(a, other)));
    }
    b.reset();
    until("its end to be seen",
          [&] { return finish(a, request, post(a, request)) == REMOTE_DISCONNECT; });
    IS(REMOTE_DISCONNECT, finish(a, request, post(a, request)));
    IS(REMOTE_DISCONNECT, a.notify("b", "?"));
    IS(SUCCESS, a.unload(remote));
    IS(SUCCESS, a.disconnect("b"));
    IS(NOT_FOUND, finish(a, other, post(a, other)));
    IS(SUCCESS, a.release(request));
    IS(SUCCESS, a.release(other));
}

} // namespace

int main(int count, char **names) {
    if (count > 2) given.erase("fabric");
    for (int at = 2; at < count; at++) {
        std::string pair = names[at];
        given.emplace(pair.substr(0, pair.find('=')), pair.substr(pair.find('=') + 1));
    }
    void *library = dlopen(names[1], RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return std::fprintf(stderr, "%s\n", dlerror()), 1;
    auto init = reinterpret_cast<Plugin *(*)()>(dlsym(library, "nixl_plugin_init"));
    auto fini = reinterpret_cast<void (*)()>(dlsym(library, "nixl_plugin_fini"));
    plugin = init();
    if (count == 3 && std::strcmp(names[2], "refused") == 0) {
        IS(true, create("a", {{"fabric", "off"}, {"device", "off"}}) == nullptr);
        return 0;
    }
    the_table();
    fini();
    plugin = init();
    what_cannot_be_created();
    Agent a = create("a");
    Memory ours(*a, 400000);
    wrong_memory(*a);
    for (int round = 0; round < 3; round++) {
        // Over a network, writes need the target's progress.
        Agent b = create("b", given, round == 1 || !given.contains("fabric"));
        // The memory belongs to the program and outlives the agent.
        auto theirs = std::make_unique<Memory>(*b, 400000);
        if (round == 0) {
            wrong_metadata(*a, *b, *theirs);
        } else {
            IS(SUCCESS, a->load_connection_info("b", info(*b)));
        }
        Metadata *remote = nullptr;
        IS(SUCCESS, a->load_remote(theirs->told(), Mem::dram, "b", remote));
        wrong_calls(*a, ours, *theirs, remote);
        transfers(*a, *b, ours, *theirs, remote);
        if (round == 1) several_threads(*a, *b, ours, *theirs, remote);
        if (round < 2) long_notifications(*a, *b);
        if (round == 1) what_is_in_progress(*a, ours);
        if (round == 0 && given.contains("fabric")) long_copies(*a, *b);
        what_is_gone(*a, b, ours, remote, *theirs);
    }
    an_agent_with_live_requests();
    // NIXL ends an agent with these calls.
    Metadata *own = nullptr;
    IS(SUCCESS, a->load_local(ours.local, own));
    IS(SUCCESS, a->deregister_memory(ours.local));
    IS(SUCCESS, a->unload(own));
    a.reset();
    fini();
    std::puts("all of them");
}
