//! Gives the library the name under which programs ask for NVIDIA's driver, and keeps it loaded: cudarc opens and closes the library once
//! before it uses it, and a library with threads must not go away.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
