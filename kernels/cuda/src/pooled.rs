//! Arrays of any number and size updated in place by few launches: an optimizer's step over all parameters.
//!
//! Before: a launch, and in most frameworks several, for each parameter. After: one launch for as many
//! arrays as its parameters have room for. A block finds its array by comparing its own number, which all
//! its threads do alike; so there is no table of pointers in memory that would have to be copied to the
//! device at every step, and a launch can be captured. Numbers such as the rate are read where they lie on
//! the device: nothing waits for them. Every operand is read once and written at most once.

use super::passes::{ALIGNMENT, Argument, Pass, PlacedLaunch};
use super::{Kernel, LaunchOp, Param, ParamType, element_type, value_text};
use graph::DType;
use kernels::emit::scalar;
use kernels::emit::text::CText;
use kernels::run::{BufferRef, ExternalSpec};
use kernels::update::{Spelling, Update, UpdateError, UpdateText};

/// Bytes of a kernel's parameters, for every driver and architecture (CUDA C++ Programming Guide, "Function
/// Parameters").
const PARAMETER_BYTES: usize = 4096;
const POINTER_BYTES: usize = 8;
const THREADS: usize = 256;
/// Vectors that a thread takes, so that what depends on no element is computed seldom.
const VECTORS: usize = 4;

/// Kernels, and the pass that launches them. Its buffers are the arrays' operands, array by array, then
/// the numbers; it needs no other memory.
#[derive(Clone, Debug)]
pub struct Pooled {
    /// One kernel for each launch.
    pub kernels: Vec<Kernel>,
    /// The launches.
    pub pass: Pass,
    /// Bytes that are read and written, each once.
    pub bytes_moved: u64,
}

/// Kernels for arrays of these sizes. Without `aligned`, arrays may start at any element.
///
/// # Errors
/// See [`UpdateError`].
pub fn emit(update: &Update, sizes: &[usize], aligned: bool) -> Result<Pooled, UpdateError> {
    let (n_operands, n_numbers) = (update.operands.len(), update.numbers.len());
    let room = (PARAMETER_BYTES / POINTER_BYTES).saturating_sub(n_numbers);
    let per_launch = room.checked_div(n_operands).unwrap_or(0);
    if per_launch == 0 {
        return Err(UpdateError::Operands {
            update: update.name.clone(),
            n: n_operands + n_numbers,
        });
    }
    let body = Body::new(update, aligned)?;
    let spec = |bytes, written| ExternalSpec { bytes, written };
    let arrays = sizes.iter().flat_map(|n| {
        let operands = update.operands.iter();
        operands.map(move |o| spec(n * o.dtype.bytes(), o.written))
    });
    let numbers = (0..n_numbers).map(|_| spec(DType::F32.bytes(), false));
    let mut pooled = Pooled {
        kernels: Vec::new(),
        pass: Pass {
            externals: arrays.chain(numbers).collect(),
            alignment: if aligned { ALIGNMENT } else { 0 },
            ..Pass::default()
        },
        bytes_moved: 0,
    };
    let each = update.operands.iter().map(|o| {
        let times = if o.written { 2 } else { 1 };
        times * o.dtype.bytes() as u64
    });
    pooled.bytes_moved = each.sum::<u64>() * sizes.iter().map(|n| *n as u64).sum::<u64>();
    let filled: Vec<usize> = (0..sizes.len()).filter(|at| sizes[*at] > 0).collect();
    for arrays in filled.chunks(per_launch) {
        let name = format!("sh_pooled{}", pooled.kernels.len());
        let (kernel, grid) = body.kernel(&name, sizes, arrays);
        let work = LaunchOp::Kernel(pooled.kernels.len());
        pooled.kernels.push(kernel);
        pooled.pass.launches.push(PlacedLaunch {
            work,
            grid: [grid, 1, 1],
            dynamic_shared_bytes: 0,
            args: body.arguments(sizes, arrays),
            writes_saved: false,
            origin: update.name.clone(),
        });
    }
    Ok(pooled)
}

/// The text that all launches have in common.
struct Body<'u> {
    update: &'u Update,
    /// Elements of a vector.
    width: usize,
    values: UpdateText,
}

impl<'u> Body<'u> {
    fn new(update: &'u Update, aligned: bool) -> Result<Body<'u>, UpdateError> {
        let spelling = Spelling {
            common: update.dtype,
            cast: value_text::cast,
        };
        let values = UpdateText::new(update, &spelling)?;
        let smallest = update.operands.iter().map(|o| o.dtype.bytes()).min();
        Ok(Body {
            update,
            width: match aligned {
                true => ALIGNMENT as usize / smallest.unwrap_or(ALIGNMENT as usize),
                false => 1,
            },
            values,
        })
    }

    /// Elements that a block takes.
    fn per_block(&self) -> usize {
        THREADS * VECTORS * self.width
    }

    /// The kernel for some of the arrays, and its blocks.
    fn kernel(&self, name: &str, sizes: &[usize], arrays: &[usize]) -> (Kernel, u32) {
        let update = self.update;
        let ctype = |n: usize| element_type(update.operands[n].dtype);
        let space = |n: usize| {
            if update.operands[n].written {
                "OUT"
            } else {
                "IN"
            }
        };
        let operands = 0..update.operands.len();
        let mut params = Vec::new();
        for at in 0..arrays.len() {
            for n in operands.clone() {
                let dtype = update.operands[n].dtype;
                let ty = match update.operands[n].written {
                    true => ParamType::InOut(dtype),
                    false => ParamType::In(dtype),
                };
                let name = format!("x{n}_{at}");
                params.push((
                    format!("SH_{}({}) {name}", space(n), ctype(n)),
                    Param { name, ty },
                ));
            }
        }
        for n in 0..update.numbers.len() {
            let (name, ty) = (format!("n{n}"), ParamType::In(DType::F32));
            params.push((format!("SH_IN(float) {name}"), Param { name, ty }));
        }
        let mut t = CText::default();
        self.element_function(name, &mut t);
        let declared: Vec<&str> = params.iter().map(|(text, _)| text.as_str()).collect();
        let head = format!("SH_KERNEL({name}, {THREADS}, 2)({})", declared.join(", "));
        t.open(&head);
        if let Some(unless) = update.unless {
            t.line(&format!("if (n{unless}[0] != 0.0f) return;"));
        }
        let value = scalar::value_type(update.dtype);
        for n in 0..update.numbers.len() {
            t.line(&format!("const {value} s{n} = n{n}[0];"));
        }
        t.lines(&self.values.common);
        for n in operands.clone() {
            t.line(&format!("SH_AT_{}({}) x{n};", space(n), ctype(n)));
        }
        t.line("sh_i64 n_elements;");
        t.line("int first;");
        let mut firsts = vec![0];
        for at in arrays {
            let blocks = sizes[*at].div_ceil(self.per_block());
            firsts.push(firsts.last().copied().unwrap_or(0) + blocks);
        }
        let grid = firsts.pop().unwrap_or(0);
        self.find(sizes, arrays, &firsts, 0, &mut t);
        self.walk(name, &mut t);
        t.close();
        let kernel = Kernel {
            name: name.to_string(),
            text: t.finish(),
            params: params.into_iter().map(|(_, param)| param).collect(),
            threads: THREADS as u32,
            min_blocks: 2,
            origin: update.name.clone(),
        };
        (kernel, grid as u32)
    }

    /// A function of one element: reads what has no successor, changes what has.
    fn element_function(&self, name: &str, t: &mut CText) {
        let update = self.update;
        let value = scalar::value_type(update.dtype);
        let mut parameters: Vec<String> = Vec::new();
        for (n, operand) in update.operands.iter().enumerate() {
            let reference = if operand.written { " &" } else { " " };
            parameters.push(format!("{}{reference}x{n}", element_type(operand.dtype)));
        }
        let numbers = (0..update.numbers.len()).map(|n| format!("s{n}"));
        let common = numbers.chain(self.values.common_names.iter().cloned());
        parameters.extend(common.map(|name| format!("{value} {name}")));
        t.open(&format!(
            "SH_FN void {name}_element({})",
            parameters.join(", ")
        ));
        for (n, operand) in update.operands.iter().enumerate() {
            let read = value_text::cast(&format!("x{n}"), operand.dtype, update.dtype);
            t.line(&format!("const {value} v{n} = {read};"));
        }
        t.lines(&self.values.element);
        t.close();
    }

    /// The call of that function on values of these names.
    fn element(&self, name: &str, of: &dyn Fn(usize) -> String) -> String {
        let operands = (0..self.update.operands.len()).map(of);
        let numbers = (0..self.update.numbers.len()).map(|n| format!("s{n}"));
        let all = operands
            .chain(numbers)
            .chain(self.values.common_names.iter().cloned());
        let all: Vec<String> = all.collect();
        format!("{name}_element({});", all.join(", "))
    }

    /// Which array a block belongs to, by binary search.
    fn find(
        &self,
        sizes: &[usize],
        arrays: &[usize],
        firsts: &[usize],
        from: usize,
        t: &mut CText,
    ) {
        if let [array] = arrays {
            for n in 0..self.update.operands.len() {
                t.line(&format!("x{n} = x{n}_{from};"));
            }
            t.line(&format!("n_elements = {};", sizes[*array]));
            t.line(&format!("first = {};", firsts[0]));
            return;
        }
        let half = arrays.len() / 2;
        let ((left, right), (lower, upper)) = (arrays.split_at(half), firsts.split_at(half));
        t.open(&format!("if (SH_BID < {})", upper[0]));
        self.find(sizes, left, lower, from, t);
        t.close();
        t.open("else");
        self.find(sizes, right, upper, from + half, t);
        t.close();
    }

    /// The block's part of its array.
    fn walk(&self, name: &str, t: &mut CText) {
        let (width, per_block) = (self.width, self.per_block());
        t.line(&format!(
            "const sh_i64 start = (sh_i64)(SH_BID - first) * {per_block};"
        ));
        t.line(&format!("const sh_i64 end = start + {per_block} < n_elements ? start + {per_block} : n_elements;"));
        let step = THREADS * width;
        t.open(&format!(
            "for (sh_i64 i = start + SH_TID * {width}; i < end; i += {step})"
        ));
        if width > 1 {
            t.open(&format!("if (i + {width} <= end)"));
            let operands = || self.update.operands.iter().enumerate();
            for (n, operand) in operands() {
                let ctype = element_type(operand.dtype);
                t.line(&format!(
                    "sh_vec<{ctype}, {width}> a{n} = sh_load<{width}>(x{n}, i);"
                ));
            }
            t.line("SH_UNROLL");
            t.open(&format!("for (int k = 0; k < {width}; k++)"));
            t.line(&self.element(name, &|n| format!("a{n}[k]")));
            t.close();
            for (n, _) in operands().filter(|(_, o)| o.written) {
                t.line(&format!("sh_store<{width}>(x{n}, i, a{n});"));
            }
            t.close();
            t.open("else");
        }
        t.open(&format!(
            "for (sh_i64 k = i; k < i + {width} && k < end; k++)"
        ));
        for (n, operand) in self.update.operands.iter().enumerate() {
            t.line(&format!("{} a{n} = x{n}[k];", element_type(operand.dtype)));
        }
        t.line(&self.element(name, &|n| format!("a{n}")));
        for (n, _) in self
            .update
            .operands
            .iter()
            .enumerate()
            .filter(|(_, o)| o.written)
        {
            t.line(&format!("x{n}[k] = a{n};"));
        }
        t.close();
        if width > 1 {
            t.close();
        }
        t.close();
    }

    /// What a launch is given: the operands of its arrays, then the numbers.
    fn arguments(&self, sizes: &[usize], arrays: &[usize]) -> Vec<Argument> {
        let n_operands = self.update.operands.len();
        let mut args = Vec::new();
        for array in arrays {
            for (n, operand) in self.update.operands.iter().enumerate() {
                args.push(Argument {
                    at: BufferRef::External(array * n_operands + n),
                    bytes: sizes[*array] * operand.dtype.bytes(),
                    name: format!("{} {array}", operand.name),
                });
            }
        }
        for (n, name) in self.update.numbers.iter().enumerate() {
            args.push(Argument {
                at: BufferRef::External(sizes.len() * n_operands + n),
                bytes: DType::F32.bytes(),
                name: name.clone(),
            });
        }
        args
    }
}
