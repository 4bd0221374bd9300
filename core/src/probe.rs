//! Static tracing probes (USDT). With the feature `probes` a probe is a `nop` and a note that
//! tracers such as bpftrace, perf and SystemTap find. Without the feature it is empty. Probes are
//! on slow paths only.
//!
//! The note has SystemTap's format, version 3: the address of the `nop`, and the location of the
//! arguments at that address.

/// Places a probe of the provider `fishplate`, with up to two arguments of 64 bits.
#[cfg(all(
    feature = "probes",
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
macro_rules! probe {
    ($name:literal, $first:expr, $second:expr) => {{
        let (first, second) = ($first as u64, $second as u64);
        // SAFETY: the code is a `nop`. The rest is data that the program never loads.
        unsafe {
            core::arch::asm!(
                "990: nop",
                // The flag `R` makes the linker keep the note, and the code that the note names. So
                // no note is left without its `nop`.
                ".pushsection .note.stapsdt, \"R\", \"note\"",
                ".balign 4",
                ".4byte 992f-991f, 994f-993f, 3",
                "991: .asciz \"stapsdt\"",
                "992: .balign 4",
                "993: .8byte 990b",
                ".8byte _.stapsdt.base",
                ".8byte 0",
                ".asciz \"fishplate\"",
                concat!(".asciz \"", $name, "\""),
                $crate::probe::arguments!(),
                "994: .balign 4",
                ".popsection",
                // Tracers compare this symbol's address with its recorded address, to learn how far
                // the code was moved after linking.
                ".ifndef _.stapsdt.base",
                ".pushsection .stapsdt.base, \"aGR\", \"progbits\", .stapsdt.base, comdat",
                ".weak _.stapsdt.base",
                ".hidden _.stapsdt.base",
                "_.stapsdt.base: .space 1",
                ".size _.stapsdt.base, 1",
                ".popsection",
                ".endif",
                in(reg) first,
                in(reg) second,
                options(nomem, nostack, preserves_flags),
            )
        }
    }};
}

#[cfg(not(all(
    feature = "probes",
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
)))]
macro_rules! probe {
    ($name:literal, $first:expr, $second:expr) => {
        let _ = (&$first, &$second);
    };
}

/// The location of the arguments, in the assembler's notation of registers.
#[cfg(all(feature = "probes", target_arch = "x86_64"))]
macro_rules! arguments {
    () => {
        ".asciz \"8@%{0} 8@%{1}\""
    };
}

#[cfg(all(feature = "probes", target_arch = "aarch64"))]
macro_rules! arguments {
    () => {
        ".asciz \"8@{0} 8@{1}\""
    };
}

#[cfg(all(feature = "probes", any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(crate) use arguments;
pub(crate) use probe;
