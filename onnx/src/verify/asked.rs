//! Values of operators without a meaning here, asked of another program instead of made up.
//!
//! Owns the model that is asked: the original with those values as its outputs. It is asked only for values whose
//! type or sizes are neither inferred nor declared.

use super::{Oracle, OracleError, VerifyError};
use crate::evaluate::Values;
use crate::file::Model;
use crate::proto::ValueInfoProto;
use std::collections::BTreeSet;
use std::sync::Arc;

/// The program to ask, and the values to ask it for.
pub(super) struct Asked {
    oracle: Arc<dyn Oracle>,
    model: Model,
    inputs: BTreeSet<String>,
    names: Vec<String>,
}

impl Asked {
    /// `None` if there is nothing to ask for.
    pub fn new(model: &Model, names: Vec<String>, oracle: &Arc<dyn Oracle>) -> Option<Asked> {
        let mut proto = model.proto.clone();
        let graph = proto.graph.as_mut().filter(|_| !names.is_empty())?;
        let output = |name: &String| ValueInfoProto {
            name: name.clone(),
            ..Default::default()
        };
        graph.output = names.iter().map(output).collect();
        let inputs = graph.input.iter().map(|input| input.name.clone()).collect();
        Some(Asked {
            oracle: Arc::clone(oracle),
            model: model.with(proto),
            inputs,
            names,
        })
    }

    /// Inputs with the values that follow from them; `None` if the other program does not run with them.
    ///
    /// # Errors
    /// [`VerifyError::Unasked`].
    pub fn with_values(&self, mut feeds: Values) -> Result<Option<Values>, VerifyError> {
        let given = feeds.iter().filter(|(name, _)| self.inputs.contains(*name));
        let given: Values = given.map(|(name, t)| (name.clone(), t.clone())).collect();
        match self.oracle.outputs(&self.model, &[given]) {
            Ok(mut outputs) => {
                let values = outputs.pop().unwrap_or_default();
                feeds.extend(self.names.iter().cloned().zip(values));
                Ok(Some(feeds))
            }
            Err(OracleError::Refused(_)) => Ok(None),
            Err(OracleError::Unasked(what)) => Err(VerifyError::Unasked {
                oracle: self.oracle.name().to_string(),
                what,
            }),
        }
    }
}
