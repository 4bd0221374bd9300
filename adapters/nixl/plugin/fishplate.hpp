// The functions of the Rust half, which `src/ffi.rs` defines. Strings and lists must stay valid
// during a call, and an agent until it is closed. Any thread may call. Functions that return int
// return NIXL's status codes.
#pragma once

#include "abi.hpp"

#include <string_view>

extern "C" {

struct fishplate_nixl_agent;

struct fishplate_nixl_bytes {
    const char *start;
    std::size_t len;
};

using fishplate_nixl_sink = void (*)(void *to, fishplate_nixl_bytes, fishplate_nixl_bytes);

void fishplate_nixl_params(fishplate_nixl_sink, void *to);
fishplate_nixl_agent *fishplate_nixl_open(fishplate_nixl_bytes name,
                                          const fishplate_nixl_bytes (*params)[2],
                                          std::size_t count, std::int64_t pause_us);
void fishplate_nixl_close(fishplate_nixl_agent *);
int fishplate_nixl_info(const fishplate_nixl_agent *, fishplate_nixl_sink, void *to);
bool fishplate_nixl_has_device();
bool fishplate_nixl_with_device(const fishplate_nixl_agent *);
int fishplate_nixl_register(const fishplate_nixl_agent *, std::int64_t device, std::uintptr_t start,
                            std::size_t len, std::uint64_t *out);
int fishplate_nixl_deregister(const fishplate_nixl_agent *, std::uint64_t);
int fishplate_nixl_export(const fishplate_nixl_agent *, std::uint64_t, fishplate_nixl_sink,
                          void *to);
int fishplate_nixl_load_peer(const fishplate_nixl_agent *, fishplate_nixl_bytes name,
                             fishplate_nixl_bytes info);
int fishplate_nixl_connect(const fishplate_nixl_agent *, fishplate_nixl_bytes name);
int fishplate_nixl_disconnect(const fishplate_nixl_agent *, fishplate_nixl_bytes name);
int fishplate_nixl_load(const fishplate_nixl_agent *, fishplate_nixl_bytes name, bool device,
                        fishplate_nixl_bytes region, std::uint64_t *out);
int fishplate_nixl_unload(const fishplate_nixl_agent *, std::uint64_t);
int fishplate_nixl_prepare(const fishplate_nixl_agent *, bool write, const abi::MetaDesc *locals,
                           std::size_t count, const abi::MetaDesc *remotes,
                           std::size_t remote_count, fishplate_nixl_bytes name, std::uint64_t *out);
int fishplate_nixl_post(const fishplate_nixl_agent *, std::uint64_t, bool notifies,
                        fishplate_nixl_bytes note);
int fishplate_nixl_check(const fishplate_nixl_agent *, std::uint64_t);
int fishplate_nixl_release(const fishplate_nixl_agent *, std::uint64_t);
int fishplate_nixl_notes(const fishplate_nixl_agent *, fishplate_nixl_sink, void *to);
int fishplate_nixl_notify(const fishplate_nixl_agent *, fishplate_nixl_bytes name,
                          fishplate_nixl_bytes note);

} // extern "C"
