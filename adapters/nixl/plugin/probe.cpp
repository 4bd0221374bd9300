// Checks the layouts of the running NIXL before the plugin uses them. NIXL does not tell a plugin
// its version, and its API number does not change with the layouts. The parameter fields must have
// plausible values. The vtable of the base class in another backend of the same installation must
// have the expected size.

#include "probe.hpp"

#include <cstdio>
#include <cstring>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace abi {
namespace {

constexpr const char *remedy =
    "use the plugin with the stock wheel nixl 1.5.1, or one with the same layouts";

// True if the memory looks like a `std::string`: its text is inside the object, or on the heap with
// plausible sizes.
bool is_string(const std::string &text) {
    const char *words = reinterpret_cast<const char *>(&text);
    const char *data;
    std::size_t size, room;
    std::memcpy(&data, words, 8);
    std::memcpy(&size, words + 8, 8);
    if (data == words + 16) return size < 16 && data[size] == 0;
    std::memcpy(&room, words + 16, 8);
    return data != nullptr && room >= 16 && size <= room && room < std::size_t{1} << 32 &&
           data[size] == 0;
}

bool is_bool(const bool &flag) { return *reinterpret_cast<const unsigned char *>(&flag) <= 1; }

bool are_params(const InitParams &init) {
    if (!is_string(init.agent) || !is_string(init.type) || init.params == nullptr) return false;
    if (!is_bool(init.progress_thread) || !is_bool(init.telemetry)) return false;
    auto sync = static_cast<unsigned>(init.sync);
    if (sync > 2 || init.delay_us > std::uint64_t{1} << 40) return false;
    // A valid small map has load factor 1 and at least one bucket.
    const auto *map = reinterpret_cast<const char *>(init.params);
    std::size_t buckets, count;
    float load;
    std::memcpy(&buckets, map + 8, 8);
    std::memcpy(&count, map + 24, 8);
    std::memcpy(&load, map + 32, 4);
    return load == 1.0f && buckets != 0 && count <= buckets && count < 4096;
}

class File {
public:
    explicit File(const std::string &path) {
        int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        struct stat found;
        if (fd >= 0 && fstat(fd, &found) == 0 && found.st_size > 0) {
            size = static_cast<std::size_t>(found.st_size);
            void *at = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
            start = at == MAP_FAILED ? nullptr : static_cast<const char *>(at);
        }
        if (fd >= 0) close(fd);
    }
    File(const File &) = delete;
    File &operator=(const File &) = delete;
    ~File() {
        if (start != nullptr) munmap(const_cast<char *>(start), size);
    }
    template <class T> bool read(T &out, std::size_t at) const {
        if (start == nullptr || at > size || sizeof(T) > size - at) return false;
        std::memcpy(&out, start + at, sizeof(T));
        return true;
    }
    bool is(std::size_t at, const char *text) const {
        std::size_t len = std::strlen(text) + 1;
        return start != nullptr && at <= size && len <= size - at &&
               std::memcmp(start + at, text, len) == 0;
    }

private:
    const char *start = nullptr;
    std::size_t size = 0;
};

// Returns the size of a dynamic symbol in an ELF file, or 0 if there is none.
std::size_t size_of_symbol(const std::string &path, const char *name) {
    File file(path);
    Elf64_Ehdr head;
    if (!file.read(head, 0) || std::memcmp(head.e_ident, ELFMAG, SELFMAG) != 0) return 0;
    for (unsigned at = 0; at < head.e_shnum; at++) {
        Elf64_Shdr section, strings;
        if (!file.read(section, head.e_shoff + at * sizeof section) ||
            section.sh_type != SHT_DYNSYM)
            continue;
        if (!file.read(strings, head.e_shoff + section.sh_link * sizeof strings)) return 0;
        for (std::size_t done = 0; done + sizeof(Elf64_Sym) <= section.sh_size;
             done += sizeof(Elf64_Sym)) {
            Elf64_Sym symbol;
            if (!file.read(symbol, section.sh_offset + done)) return 0;
            if (symbol.st_shndx != SHN_UNDEF && file.is(strings.sh_offset + symbol.st_name, name))
                return symbol.st_size;
        }
    }
    return 0;
}

int find_library(dl_phdr_info *info, std::size_t, void *to) {
    std::string path = info->dlpi_name == nullptr ? "" : info->dlpi_name;
    std::size_t slash = path.rfind('/');
    if (slash == std::string::npos || path.compare(slash + 1, std::string::npos, "libnixl.so") != 0)
        return 0;
    static_cast<std::string *>(to)->assign(path, 0, slash + 1);
    return 1;
}

} // namespace

bool matches(const InitParams *init) {
    if (init == nullptr || !are_params(*init)) {
        std::fprintf(stderr, "fishplate: NIXL passes parameters in an unknown layout; %s\n",
                     remedy);
        return false;
    }
    std::string folder;
    dl_iterate_phdr(find_library, &folder);
    bool compared = folder.empty();
    for (const char *backend : {"UCX", "POSIX"}) {
        std::string path = folder + "plugins/libplugin_" + backend + ".so";
        std::size_t size = folder.empty() ? 0 : size_of_symbol(path, "_ZTV17nixlBackendEngine");
        // The vtable symbol starts with two words before its functions: an offset and the type
        // information.
        if (size != 0 && size != (slots + 2) * sizeof(void *)) {
            std::fprintf(
                stderr,
                "fishplate: backends of this NIXL have %zu virtual functions, not %zu; %s\n",
                size / sizeof(void *) - 2, slots, remedy);
            return false;
        }
        compared = compared || size != 0;
    }
    if (!compared) {
        std::fprintf(stderr,
                     "fishplate: cannot read the class layout from any backend of this NIXL; %s\n",
                     remedy);
        return false;
    }
    return true;
}

} // namespace abi
