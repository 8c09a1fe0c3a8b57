//! The declaration of a shared library's functions, each once, with their loading and what stands in its way.

/// A struct `Interface` with a field for each function, and `Interface::new`, which finds them all in a
/// library. The signatures must be those of the library's header.
macro_rules! interface {
    ($($field:ident = $symbol:literal : fn($($arg:ty),*) -> $result:ty;)*) => {
        struct Interface { $($field: unsafe extern "C" fn($($arg),*) -> $result,)* }
        impl Interface {
            fn new(
                library: &libloading::os::unix::Library,
            ) -> Result<Interface, libloading::Error> {
                // SAFETY: the signatures are the header's.
                unsafe { Ok(Interface { $($field: *library.get($symbol)?,)* }) }
            }
        }
    };
}

pub(crate) use interface;

/// What stands in the way of a library, with the loader's own words (the error's source).
pub(crate) fn told(problem: &libloading::Error) -> String {
    match std::error::Error::source(problem) {
        Some(source) => format!("{problem}: {source}"),
        None => problem.to_string(),
    }
}
