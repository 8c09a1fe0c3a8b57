//! The declaration of a shared library's functions, each once, with their loading.

/// A struct `Interface` with a field for each function, and `Interface::of`, which finds them all in a
/// library. The signatures must be those of the library's header.
macro_rules! interface {
    ($($field:ident = $symbol:literal : fn($($arg:ty),*) -> $result:ty;)*) => {
        struct Interface { $($field: unsafe extern "C" fn($($arg),*) -> $result,)* }
        impl Interface {
            fn of(
                library: &libloading::os::unix::Library,
            ) -> Result<Interface, libloading::Error> {
                // SAFETY: the signatures are the header's.
                unsafe { Ok(Interface { $($field: *library.get($symbol)?,)* }) }
            }
        }
    };
}

pub(in crate::cuda) use interface;
