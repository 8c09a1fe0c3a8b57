//! Kernels of a later size call what earlier sizes of the same model compiled.

use super::{Lowered, PLACEHOLDER, Source, head};
use crate::compile::SourceUnit;
use crate::templates::{Own, Purpose, SUPPORT, Templates};
use std::sync::Arc;

impl Lowered {
    /// Has kernels call what earlier sizes of the same model compiled, where only numbers differ; the
    /// first program's stay as they are. Kernels of a later program have a file each, so that the
    /// sizes after it can take them one by one.
    pub fn share(&mut self, templates: &mut Templates) {
        let n_buffers = self.n_buffers();
        let is_first = templates.is_empty();
        templates.note(&self.choices, !is_first);
        if !is_first {
            // Kernels of several layers may differ in numbers as well.
            self.show(templates, &n_buffers);
        }
        let files: Vec<Arc<SourceUnit>> = self.units.iter().cloned().map(Arc::new).collect();
        let mut unit_of_source = vec![0; self.sources.len()];
        for launch in &self.launches {
            unit_of_source[launch.source] = launch.unit;
        }
        let mut units: Vec<Arc<SourceUnit>> = Vec::new();
        let mut calls: Vec<(usize, Option<usize>, Vec<String>)> = Vec::new();
        for (at, source) in self.sources.iter().enumerate() {
            let own = own_of(source, n_buffers[at]);
            if is_first {
                templates.keep(&own, &files[unit_of_source[at]]);
                continue;
            }
            let shared = templates.share(&own, Purpose::Run, |text| file_of(source, text));
            let unit = units
                .iter()
                .position(|unit| *unit == shared.unit)
                .unwrap_or(units.len());
            if unit == units.len() {
                units.push(shared.unit);
            }
            let values = shared.values.map(|values| {
                self.values.push(values);
                self.values.len() - 1
            });
            calls.push((unit, values, shared.symbols));
        }
        templates.close_program();
        if is_first {
            return;
        }
        for launch in &mut self.launches {
            let (unit, values, symbols) = &calls[launch.source];
            let own = &self.sources[launch.source].symbols;
            if let Some(at) = own.iter().position(|symbol| *symbol == launch.symbol) {
                launch.symbol.clone_from(&symbols[at]);
            }
            launch.unit = *unit;
            launch.values = *values;
        }
        self.units = units.into_iter().map(Arc::unwrap_or_clone).collect();
    }

    /// Shows how kernels of sizes that may come differ from those of earlier ones, so that texts that are
    /// compiled from here on serve them as well. A text is compiled when a program calls it.
    pub fn foresee(&self, templates: &mut Templates) {
        templates.note(&self.choices, false);
        self.show(templates, &self.n_buffers());
        templates.close_program();
    }

    fn show(&self, templates: &mut Templates, n_buffers: &[usize]) {
        for (source, n_buffers) in self.sources.iter().zip(n_buffers) {
            let own = own_of(source, *n_buffers);
            templates.share(&own, Purpose::Foresee, |text| file_of(source, text));
        }
    }

    /// Number of buffers that the launches of each source give.
    fn n_buffers(&self) -> Vec<usize> {
        let mut n_buffers = vec![0; self.sources.len()];
        for launch in &self.launches {
            n_buffers[launch.source] = launch.args.len();
        }
        n_buffers
    }
}

fn own_of(source: &Source, n_buffers: usize) -> Own<'_> {
    Own {
        text: &source.text,
        placeholder: PLACEHOLDER,
        name: &source.name,
        symbols: &source.symbols,
        n_buffers,
    }
}

/// The file of a kernel that several sizes call.
fn file_of(source: &Source, text: &str) -> SourceUnit {
    SourceUnit {
        name: source.name.clone(),
        source: format!("{}{SUPPORT}{}{text}\n", head(), source.comment),
        symbols: source.symbols.clone(),
    }
}
