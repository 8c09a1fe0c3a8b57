//! Depthwise convolutions.
use super::gather::GatherForm;
use super::{EmittedContraction, Hooks, NoFastPath, Target};
pub fn emit(
    _name: &str,
    _form: &GatherForm,
    _hooks: &Hooks,
    _target: &Target,
) -> Result<Option<EmittedContraction>, NoFastPath> {
    Ok(None)
}
