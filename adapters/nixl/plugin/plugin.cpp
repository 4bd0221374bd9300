// `libplugin_FISHPLATE.so`: the virtual tables, strings and vectors of a NIXL backend. The logic is
// in Rust. No function that returns a status throws.

#include "fishplate.hpp"
#include "probe.hpp"

#include <cstdio>
#include <exception>
#include <memory>

namespace abi {

namespace {
constexpr Status success = 0;
constexpr Status invalid = -2;
constexpr Status backend = -3;
constexpr Status not_supported = -9;
} // namespace

Status Engine::prepare_remote_view(const void *, void *&, const OptionalArgs *) const {
    return not_supported;
}
Status Engine::prepare_view(const void *, void *&, const OptionalArgs *) const {
    return not_supported;
}
void Engine::release_view(void *) const {}
Status Engine::query(const List<BlobDesc> &, std::vector<Answer> &) const { return not_supported; }
Status Engine::estimate(const Op &, const List<MetaDesc> &, const List<MetaDesc> &,
                        const std::string &, Request *const &, std::int64_t &, std::int64_t &,
                        Cost &, const OptionalArgs *) const {
    return not_supported;
}

namespace {

fishplate_nixl_bytes bytes(std::string_view text) { return {text.data(), text.size()}; }

// Collects results that Rust passes to a sink. Running out of memory sets `full`, because no
// exception may unwind through Rust.
template <class T> struct Out {
    T &value;
    bool full = false;

    template <class Keep> static void keep(void *to, Keep keep) noexcept {
        auto *out = static_cast<Out *>(to);
        try {
            keep(out->value);
        } catch (...) {
            out->full = true;
        }
    }
    Status status(Status got) const { return full ? backend : got; }
};

std::string string(fishplate_nixl_bytes text) { return std::string(text.start, text.len); }
void keep_string(void *to, fishplate_nixl_bytes text, fishplate_nixl_bytes) {
    Out<std::string>::keep(to, [&](auto &out) { out = string(text); });
}
void keep_param(void *to, fishplate_nixl_bytes name, fishplate_nixl_bytes value) {
    Out<Params>::keep(to, [&](auto &out) { out.emplace(string(name), string(value)); });
}
void keep_note(void *to, fishplate_nixl_bytes name, fishplate_nixl_bytes note) {
    Out<Notes>::keep(to, [&](auto &out) { out.emplace_back(string(name), string(note)); });
}

// NIXL's metadata of a region. Rust reads the region's number at a fixed offset.
struct Region final : Metadata {
    Region(bool is_private, std::uint64_t number) : Metadata(is_private), number(number) {}
    std::uint64_t number;
};
static_assert(sizeof(Region) == 24);

struct Transfer final : Request {
    std::uint64_t number = 0;
    Transfer *before = nullptr, *after = nullptr;
};

// The requests that NIXL has not released. Several threads may add and remove requests at the same
// time.
class Transfers {
public:
    Transfers() = default;
    Transfers(const Transfers &) = delete;
    Transfers &operator=(const Transfers &) = delete;
    ~Transfers() {
        while (first != nullptr) remove(first);
    }
    void add(Transfer *transfer) {
        std::lock_guard guard(lock);
        transfer->after = first;
        if (first != nullptr) first->before = transfer;
        first = transfer;
    }
    void remove(Transfer *transfer) {
        {
            std::lock_guard guard(lock);
            (transfer->before == nullptr ? first : transfer->before->after) = transfer->after;
            if (transfer->after != nullptr) transfer->after->before = transfer->before;
        }
        delete transfer;
    }

private:
    std::mutex lock;
    Transfer *first = nullptr;
};

std::uint64_t number_of(const Metadata *metadata) {
    return static_cast<const Region *>(metadata)->number;
}

struct Closes {
    void operator()(fishplate_nixl_agent *agent) const { fishplate_nixl_close(agent); }
};

bool is_memory(Mem mem) { return mem == Mem::dram || mem == Mem::vram; }
Mems mems(bool device) { return device ? Mems{Mem::dram, Mem::vram} : Mems{Mem::dram}; }

class Backend final : public Engine {
public:
    explicit Backend(const InitParams &init) : Engine(init) {
        std::vector<fishplate_nixl_bytes> params;
        for (const auto &[name, value] : *init.params) {
            params.push_back(bytes(name));
            params.push_back(bytes(value));
        }
        auto pairs = reinterpret_cast<const fishplate_nixl_bytes(*)[2]>(params.data());
        auto pause =
            init.progress_thread ? static_cast<std::int64_t>(init.delay_us & INT64_MAX) : -1;
        opened.reset(fishplate_nixl_open(bytes(agent), pairs, params.size() / 2, pause));
        init_error = opened == nullptr;
    }

    bool supports_remote() const override { return true; }
    bool supports_local() const override { return true; }
    bool supports_notes() const override { return true; }
    Mems supported_mems() const override { return mems(fishplate_nixl_with_device(opened.get())); }

    Status register_memory(const BlobDesc &desc, const Mem &mem, Metadata *&out) override {
        if (!is_memory(mem)) return not_supported;
        auto device = mem == Mem::vram ? static_cast<std::int64_t>(desc.device & INT64_MAX) : -1;
        return with_region(true, out, [&](std::uint64_t *number) {
            return fishplate_nixl_register(opened.get(), device, desc.address, desc.len, number);
        });
    }

    Status deregister_memory(Metadata *metadata) override {
        if (metadata == nullptr) return invalid;
        Status status = fishplate_nixl_deregister(opened.get(), number_of(metadata));
        if (status == success) delete metadata;
        return status;
    }

    Status connect(const std::string &name) override {
        return fishplate_nixl_connect(opened.get(), bytes(name));
    }
    Status disconnect(const std::string &name) override {
        return fishplate_nixl_disconnect(opened.get(), bytes(name));
    }

    // Frees metadata from `load_local` or `load_remote`, possibly after `deregister_memory`.
    Status unload(Metadata *metadata) override {
        if (metadata == nullptr) return success;
        Status status = metadata->is_private
                            ? success
                            : fishplate_nixl_unload(opened.get(), number_of(metadata));
        delete metadata;
        return status;
    }

    Status prepare(const Op &op, const List<MetaDesc> &locals, const List<MetaDesc> &remotes,
                   const std::string &name, Request *&out, const OptionalArgs *) const override {
        if (!is_memory(locals.mem) || !is_memory(remotes.mem)) return not_supported;
        return guarded([&] {
            auto transfer = std::make_unique<Transfer>();
            Status status = fishplate_nixl_prepare(
                opened.get(), op == Op::write, locals.descs.data(), locals.descs.size(),
                remotes.descs.data(), remotes.descs.size(), bytes(name), &transfer->number);
            out = nullptr;
            if (status == success) {
                transfers.add(transfer.get());
                out = transfer.release();
            }
            return status;
        });
    }

    Status post(const Op &, const List<MetaDesc> &, const List<MetaDesc> &, const std::string &,
                Request *&request, const OptionalArgs *args) const override {
        if (request == nullptr) return invalid;
        bool notifies = args != nullptr && args->has_note;
        std::string_view note = notifies ? std::string_view(args->note) : std::string_view();
        return fishplate_nixl_post(opened.get(), static_cast<Transfer *>(request)->number, notifies,
                                   bytes(note));
    }

    Status check(Request *request) const override {
        if (request == nullptr) return invalid;
        return fishplate_nixl_check(opened.get(), static_cast<Transfer *>(request)->number);
    }

    Status release(Request *request) const override {
        if (request == nullptr) return success;
        // Always returns success: on an error NIXL would keep the request and use it again.
        auto transfer = static_cast<Transfer *>(request);
        fishplate_nixl_release(opened.get(), transfer->number);
        transfers.remove(transfer);
        return success;
    }

    Status public_data(const Metadata *metadata, std::string &out) const override {
        if (metadata == nullptr) return invalid;
        Out<std::string> to{out};
        return to.status(
            fishplate_nixl_export(opened.get(), number_of(metadata), keep_string, &to));
    }

    Status connection_info(std::string &out) const override {
        Out<std::string> to{out};
        return to.status(fishplate_nixl_info(opened.get(), keep_string, &to));
    }

    Status load_connection_info(const std::string &name, const std::string &info) override {
        return fishplate_nixl_load_peer(opened.get(), bytes(name), bytes(info));
    }

    Status load_remote(const BlobDesc &desc, const Mem &mem, const std::string &name,
                       Metadata *&out) override {
        if (!is_memory(mem)) return not_supported;
        return with_region(false, out, [&](std::uint64_t *number) {
            return fishplate_nixl_load(opened.get(), bytes(name), mem == Mem::vram,
                                       bytes(desc.blob), number);
        });
    }

    Status load_local(Metadata *in, Metadata *&out) override {
        if (in == nullptr) return invalid;
        return with_region(true, out, [&](std::uint64_t *number) {
            *number = number_of(in);
            return success;
        });
    }

    Status take_notes(Notes &out) override {
        Out<Notes> to{out};
        return to.status(fishplate_nixl_notes(opened.get(), keep_note, &to));
    }

    Status notify(const std::string &name, const std::string &note) const override {
        return fishplate_nixl_notify(opened.get(), bytes(name), bytes(note));
    }

    bool failed() const { return init_error; }

private:
    template <class Call> static Status guarded(Call call) {
        try {
            return call();
        } catch (const std::exception &error) {
            std::fprintf(stderr, "fishplate: %s\n", error.what());
            return backend;
        }
    }

    template <class Call> static Status with_region(bool is_private, Metadata *&out, Call call) {
        return guarded([&] {
            auto region = std::make_unique<Region>(is_private, 0);
            Status status = call(&region->number);
            out = status == success ? region.release() : nullptr;
            return status;
        });
    }

    // NIXL destroys an agent without releasing its requests.
    mutable Transfers transfers;
    std::unique_ptr<fishplate_nixl_agent, Closes> opened;
};

Engine *create(const InitParams *init) {
    try {
        if (!abi::matches(init)) return nullptr;
        auto engine = std::make_unique<Backend>(*init);
        return engine->failed() ? nullptr : engine.release();
    } catch (const std::exception &error) {
        std::fprintf(stderr, "fishplate: cannot open the NIXL backend: %s\n", error.what());
        return nullptr;
    }
}

void destroy(Engine *engine) { delete engine; }
const char *name() { return "FISHPLATE"; }
const char *version() { return FISHPLATE_VERSION; }
Params options() {
    Params params;
    Out<Params> to{params};
    fishplate_nixl_params(keep_param, &to);
    return params;
}
Mems all_mems() { return mems(fishplate_nixl_has_device()); }

Plugin plugin = {api_version, create, destroy, name, version, options, all_mems};

} // namespace
} // namespace abi

extern "C" {
__attribute__((visibility("default"))) abi::Plugin *nixl_plugin_init() { return &abi::plugin; }
__attribute__((visibility("default"))) void nixl_plugin_fini() {}
}
