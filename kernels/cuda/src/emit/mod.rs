//! CUDA text of a scheduled kernel.
//!
//! Owns the launches a map becomes: the kernel, what must be stored before it and what is added up or
//! rounded after it. Only names of the prelude are special to the device. Never chooses what runs
//! where; that is [`super::schedule`]'s.

mod flat;
mod leaf;
mod parts;
mod rows;
mod survey;

use super::schedule::{Scheduled, Shape, loops::points};
use super::value_text;
use super::{Emitted, Kernel, Param, ParamType, element_type};
use flat::Body;
use graph::{ContainerId, DType, Reduction};
use kernels::emit::body::Array;
use kernels::emit::scalar;
use kernels::emit::text::CText;
use kernels::plan::Buffer;
use rows::RowsText;
use std::collections::BTreeSet;
use survey::Survey;

/// Stands for the kernel's name in [`Kernel::text`] until it has one.
pub(super) const NAME: &str = "@NAME@";
/// Threads of a block that stores or rounds elements.
const FILL_THREADS: u32 = 256;
/// Threads of a block that adds up parts, of 32 sums each.
const COMBINE_THREADS: u32 = 512;

/// The launches of one map, in order, and the memory that only they use.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Printed {
    pub(super) launches: Vec<Emitted>,
    /// Bytes of each workspace; the launches count these from 0.
    pub(super) workspace_bytes: Vec<usize>,
}

impl Printed {
    /// The containers that its launches touch in memory.
    pub(super) fn containers(&self) -> BTreeSet<ContainerId> {
        let args = self.launches.iter().flat_map(|launch| &launch.args);
        let container = |buffer: &Buffer| match buffer {
            Buffer::Container(id) => Some(*id),
            Buffer::Workspace(_) => None,
        };
        args.filter_map(container).collect()
    }

    /// Adds the launches of a later part, whose workspaces are others.
    pub(super) fn append(&mut self, later: Printed) {
        let first = self.workspace_bytes.len();
        self.workspace_bytes.extend(later.workspace_bytes);
        for mut launch in later.launches {
            for buffer in &mut launch.args {
                if let Buffer::Workspace(n) = buffer {
                    *n += first;
                }
            }
            self.launches.push(launch);
        }
    }

    fn workspace(&mut self, dtype: DType, len: i64) -> Buffer {
        self.workspace_bytes.push(len as usize * dtype.bytes());
        Buffer::Workspace(self.workspace_bytes.len() - 1)
    }
}

/// Prints a kernel, preceded by launches that store the identity where its reductions need it, and
/// followed by those that add up what blocks left in parts. Reductions in memory into half-precision
/// containers go to single-precision workspaces, which a launch after the kernel rounds.
pub(super) fn print(s: &Scheduled, origin: &str) -> Printed {
    let is_half = |id: &ContainerId| matches!(s.arrays[id].dtype, DType::F16 | DType::BF16);
    let combined = Survey::new(s).fills;
    let widened: Vec<ContainerId> = combined.into_keys().filter(is_half).collect();
    let mut wide = s.clone();
    for id in &widened {
        let mut array = s.arrays[id].clone();
        array.dtype = DType::F32;
        wide.arrays.insert(*id, array);
    }
    let survey = Survey::new(&wide);
    let mut printed = Printed::default();
    let mut places: Vec<(ContainerId, Buffer)> = Vec::new();
    for id in &widened {
        places.push((*id, printed.workspace(DType::F32, s.arrays[id].len)));
    }
    let place = |id: &ContainerId, places: &[(ContainerId, Buffer)]| {
        let moved = places.iter().find(|(w, _)| w == id);
        moved.map_or(Buffer::Container(*id), |(_, b)| *b)
    };
    let in_memory = |id: &&ContainerId| !s.arrays[*id].local;
    for id in survey.fills.keys().filter(in_memory) {
        let (array, r) = (&wide.arrays[id], survey.fills[id]);
        printed
            .launches
            .push(fill(array, place(id, &places), r, origin));
    }
    let n_parts = survey.rows().map_or(1, |r| r.parts);
    for (id, (_, dtype)) in survey.parts.iter().filter(|_| n_parts > 1) {
        let len = n_parts * s.arrays[id].len;
        places.push((*id, printed.workspace(*dtype, len)));
    }
    let body = body(&survey);
    let buffer = |id: &ContainerId| place(id, &places);
    printed.launches.push(frame(&survey, body, &buffer, origin));
    for (id, (r, dtype)) in survey.parts.iter().filter(|_| n_parts > 1) {
        let sum = Combine {
            array: &s.arrays[id],
            n_parts,
            reduction: *r,
            dtype: *dtype,
        };
        printed.launches.push(sum.launch(buffer(id), *id, origin));
    }
    for id in &widened {
        printed
            .launches
            .push(round(&s.arrays[id], buffer(id), *id, origin));
    }
    printed
}

fn body(survey: &Survey) -> Body {
    let nothing = || Body {
        text: String::new(),
        grid: 1,
        threads: 32,
    };
    match &survey.s.shape {
        Shape::Flat(leaf) => flat::flat(survey, leaf),
        Shape::Tiles(t) => flat::tiles(survey, t),
        Shape::Scatter(c) => flat::scatter(survey, c).unwrap_or_else(nothing),
        Shape::Rows(rows) => {
            let text = RowsText { survey, rows };
            let mut shared = CText::default();
            for (dtype, n) in text.exchanges() {
                let (ctype, name) = (element_type(dtype), parts::exchange_name(dtype));
                shared.line(&format!("SH_SHARED({ctype}, {name}, {n});"));
            }
            Body {
                text: shared.finish() + &text.body(),
                grid: points(&rows.blocks) * rows.parts,
                threads: rows.group * rows.groups,
            }
        }
    }
}

/// The function around a body: parameters and shared arrays.
fn frame(
    survey: &Survey,
    body: Body,
    buffer: &dyn Fn(&ContainerId) -> Buffer,
    origin: &str,
) -> Emitted {
    let (mut params, mut args, mut signature) = (Vec::new(), Vec::new(), Vec::new());
    let mut text = CText::default();
    let in_parts = |id: &ContainerId| {
        let sums = survey.parts.get(id);
        sums.filter(|_| survey.rows().is_some_and(|r| r.parts > 1))
    };
    for (id, name) in &survey.names {
        let array = survey.array(*id);
        let ctype = element_type(array.dtype);
        if array.local {
            let shared = match survey.rows() {
                Some(_) => survey.home(*id) == Some(super::schedule::Home::Shared),
                None => false,
            };
            if shared && survey.loaded.contains(id) {
                text.line(&format!("SH_SHARED({ctype}, {name}, {});", array.len));
            }
            continue;
        }
        let (macro_, name, ty) = match in_parts(id) {
            Some((_, dtype)) => ("SH_OUT", format!("w{}", id.0), ParamType::Out(*dtype)),
            None if survey.written.contains(id) => {
                ("SH_OUT", name.clone(), ParamType::Out(array.dtype))
            }
            None => ("SH_IN", name.clone(), ParamType::In(array.dtype)),
        };
        let dtype = ty.dtype();
        signature.push(format!("{macro_}({}) {name}", element_type(dtype)));
        params.push(Param { name, ty });
        args.push(buffer(id));
    }
    text.lines(&body.text);
    let mut whole = CText::default();
    whole.open(&format!(
        "SH_KERNEL({NAME}, {}, 1)({})",
        body.threads,
        signature.join(", ")
    ));
    whole.lines(&text.finish());
    whole.close();
    Emitted {
        kernel: Kernel {
            name: NAME.to_string(),
            text: whole.finish(),
            params,
            threads: body.threads as u32,
            min_blocks: 1,
            origin: origin.to_string(),
        },
        grid: body.grid as u64,
        args,
    }
}

fn param(name: &str, ty: ParamType) -> Param {
    let name = name.to_string();
    Param { name, ty }
}

/// Rounds sums to the container's type.
fn round(array: &Array, from: Buffer, to: ContainerId, origin: &str) -> Emitted {
    let (ctype, n) = (element_type(array.dtype), array.len);
    let text = format!(
        "SH_KERNEL({NAME}, {FILL_THREADS}, 1)(SH_IN(float) x0, SH_OUT({ctype}) x1) {{\n  const long p \
         = (long)SH_BID * {FILL_THREADS} + SH_TID;\n  if (p < {n}) x1[p] = \
         sh_from_float<{ctype}>(x0[p]);\n}}\n"
    );
    let params = vec![
        param("x0", ParamType::In(DType::F32)),
        param("x1", ParamType::Out(array.dtype)),
    ];
    let args = vec![from, Buffer::Container(to)];
    let grid = (n as u64).div_ceil(u64::from(FILL_THREADS));
    launch(text, params, FILL_THREADS, grid, args, origin)
}

fn fill(array: &Array, buffer: Buffer, reduction: Reduction, origin: &str) -> Emitted {
    let ctype = element_type(array.dtype);
    let identity = scalar::literal(reduction.identity(array.dtype), array.dtype);
    let n = array.len;
    let text = format!(
        "SH_KERNEL({NAME}, {FILL_THREADS}, 1)(SH_OUT({ctype}) x0) {{\n  const long p = \
         (long)SH_BID * {FILL_THREADS} + SH_TID;\n  if (p < {n}) x0[p] = {identity};\n}}\n"
    );
    let params = vec![param("x0", ParamType::Out(array.dtype))];
    let grid = (n as u64).div_ceil(u64::from(FILL_THREADS));
    launch(text, params, FILL_THREADS, grid, vec![buffer], origin)
}

fn launch(
    text: String,
    params: Vec<Param>,
    threads: u32,
    grid: u64,
    args: Vec<Buffer>,
    origin: &str,
) -> Emitted {
    let kernel = Kernel {
        name: NAME.to_string(),
        text,
        params,
        threads,
        min_blocks: 1,
        origin: origin.to_string(),
    };
    Emitted { kernel, grid, args }
}

/// Adds up what blocks left, each element in the order of the parts.
struct Combine<'a> {
    array: &'a Array,
    n_parts: i64,
    reduction: Reduction,
    /// Element type of the sums.
    dtype: DType,
}

impl Combine<'_> {
    fn launch(&self, from: Buffer, to: ContainerId, origin: &str) -> Emitted {
        let (ctype, sum) = (element_type(self.array.dtype), element_type(self.dtype));
        let (n, threads) = (self.array.len, COMBINE_THREADS);
        let rows = threads / 32;
        let identity = scalar::literal(self.reduction.identity(self.dtype), self.dtype);
        let plus = |b: &str| scalar::binary(self.reduction.combine(), "a0", b, self.dtype);
        let mut t = CText::default();
        t.open(&format!(
            "SH_KERNEL({NAME}, {threads}, 1)(SH_IN({sum}) x0, SH_OUT({ctype}) x1)"
        ));
        t.line(&format!("SH_SHARED({sum}, s0, {threads});"));
        t.line("const int p0 = SH_BID * 32 + SH_LANE;");
        t.line(&format!("{sum} a0 = {identity};"));
        t.open(&format!("if (p0 < {n})"));
        t.line(&format!(
            "for (int part = SH_WARP; part < {}; part += {rows}) a0 = {};",
            self.n_parts,
            plus(&format!("x0[part * {n} + p0]"))
        ));
        t.close();
        t.line("s0[SH_TID] = a0;");
        t.line("SH_SYNC();");
        t.open(&format!("if (SH_WARP == 0 && p0 < {n})"));
        t.line(&format!(
            "for (int p1 = 1; p1 < {rows}; ++p1) a0 = {};",
            plus("s0[p1 * 32 + SH_LANE]")
        ));
        let rounded = value_text::cast("a0", self.dtype, self.array.dtype);
        t.line(&format!("x1[p0] = {rounded};"));
        t.close();
        t.close();
        let params = vec![
            param("x0", ParamType::In(self.dtype)),
            param("x1", ParamType::Out(self.array.dtype)),
        ];
        let args = vec![from, Buffer::Container(to)];
        let grid = (n as u64).div_ceil(32);
        launch(t.finish(), params, threads, grid, args, origin)
    }
}
