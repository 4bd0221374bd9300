//! Compares every structure of `fishplate_sys::fabric::raw` with the official binding: offsets at
//! compile time, field sizes at run time. Structures of a later library may be longer.
#![allow(
    clippy::unnecessary_cast,
    reason = "the binding's types of numbers are its generator's choice"
)]

#[cfg(feature = "oracle")]
mod compared {
    use fishplate_sys::fabric::raw as ours;
    use libfabric_sys::bindgen as theirs;
    use memoffset::{offset_of, span_of};
    use static_assertions::{const_assert, const_assert_eq};

    macro_rules! layout {
        (
            structures { $($structure:ident { $($field:ident)* })* }
            renamed { $($of:ident $name:ident $c:literal $generated:ident)* }
            numbers { $($number:ident)* }
        ) => {
            $(
                const_assert!(size_of::<ours::$structure>() <= size_of::<theirs::$structure>());
                $(layout!(@field $structure $field $field);)*
            )*
            $(layout!(@field $of $name $generated);)*
            /// Compares offsets and sizes of fields. The size macro works only at run time.
            pub fn spans() {
                $($(layout!(@span $structure $field $field);)*)*
                $(layout!(@span $of $name $generated);)*
            }
            // The binding lacks the constants that C defines by a macro with a cast. A C program
            // compares them.
            pub const NUMBERS: &[(&str, u64)] = &[$((stringify!($number), ours::$number as u64)),*];
            pub const STRUCTURES: &[&str] = &[$(stringify!($structure)),*];
        };
        (@field $structure:ident $ours:ident $theirs:ident) => {
            const_assert_eq!(
                offset_of!(ours::$structure, $ours),
                offset_of!(theirs::$structure, $theirs)
            );
        };
        (@span $structure:ident $ours:ident $theirs:ident) => {
            assert_eq!(
                span_of!(ours::$structure, $ours),
                span_of!(theirs::$structure, $theirs),
                "{}.{}",
                stringify!($structure),
                stringify!($ours)
            );
        };
    }

    include!("../../../sys/tests/layout/list.rs");
}

#[cfg(feature = "oracle")]
fn main() {
    compared::spans();
    println!(
        "{} structures agree with the official binding; {} numbers are the C probe's",
        compared::STRUCTURES.len(),
        compared::NUMBERS.len()
    );
}

#[cfg(not(feature = "oracle"))]
fn main() {
    println!("SKIPPED fabric-oracle: build with --features oracle, as tests/fabric-oracle.sh does");
}
