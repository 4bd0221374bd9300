//! Sets the soname, by which programs find the shared library at run time.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libfishplate.so.0");
}
