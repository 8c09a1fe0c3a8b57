//! Lowering of contractions with 16-bit containers: the same generators as in single precision, with
//! conversions around them.
//!
//! Operands are widened while they are packed or staged, or multiplied as they are where the target can; a
//! result's sums lie in a thread's memory or in a workspace until they are rounded, block by block, by an
//! epilogue. Where the generator takes no such hooks (depthwise convolutions, plain loops), whole containers are
//! converted by launches before and after.

use super::split::{SplitReason, Stop, not_emitted, refused, split_reason};
use super::work::{KernelCost, work};
use super::{Lowering, PLACEHOLDER, operations, product_dims};
use crate::contraction::{
    self, Contraction, EmittedContraction, Hooks, NoFastForm, ScalarForm, convert,
};
use crate::emit::{self, ProductRoles};
use crate::features::Pairs;
use crate::halves::is_half;
use crate::lower::LowerError;
use crate::plan::{self, Buffer};
use crate::recognize::Recognized;
use graph::{ContainerId, DType, Node, Place, Storage};

/// First buffer after the contraction's own.
const FIRST: usize = 4;

/// What the launches of one kernel are given besides their scratch: its text and its buffers from
/// [`FIRST`] on.
#[derive(Default)]
struct Around {
    before: String,
    after: String,
    first_symbols: Vec<String>,
    last_symbols: Vec<String>,
    more: Vec<Buffer>,
    /// The work of what runs on each block.
    rest: KernelCost,
    /// Why instructions for pairs of its operands do not fit, where the target has them.
    no_pairs: Option<NoFastForm>,
    /// The place of the recipe's decision about blocking, which is not followed.
    uncut: Option<Place>,
}

impl Lowering<'_> {
    /// Whether a contraction reads or writes 16-bit numbers.
    pub(super) fn has_halves(&self, found: &Recognized) -> bool {
        let all = [found.a, found.b, found.out];
        all.into_iter().any(|id| is_half(self.dtype(id)))
    }

    fn dtype(&self, id: ContainerId) -> DType {
        self.graph.container(id).dtype
    }

    pub(super) fn elements(&self, id: ContainerId) -> Result<usize, LowerError> {
        Ok(plan::container_bytes(&self.graph, id)? / self.dtype(id).bytes())
    }

    /// Lowers such a contraction alone.
    pub(super) fn whole_half_contraction(
        &mut self,
        node: &Node,
        found: &Recognized,
    ) -> Result<(), LowerError> {
        let written = self.half_contraction(node, found, None);
        match split_reason(written)? {
            None => Ok(()),
            // There is nothing to split off, so this does not happen.
            Some(reason) => Err(not_emitted(node, &reason.to_string())),
        }
    }

    /// Lowers such a contraction, with `rest` run on every block of the product while it is in cache. Adds
    /// nothing if it returns a [`Stop`].
    pub(super) fn half_contraction(
        &mut self,
        node: &Node,
        found: &Recognized,
        rest: Option<&Node>,
    ) -> Result<(), Stop> {
        // A recipe's blocking is for operands in single precision.
        let place = self.requested(node, found);
        let ignored = self.target.requested.blocking.take();
        let c = &found.contraction;
        let plain = self.emitted(c, &Hooks::default());
        let plain = plain.map_err(|e| refused(node, e))?;
        let takes_hooks = plain.takes_prologues;
        let mut around = Around {
            uncut: ignored.map(|_| place),
            ..Around::default()
        };
        let hooked = rest.is_some() || is_half(self.dtype(found.out));
        let hook = hooked.then(|| format!("{PLACEHOLDER}_block"));
        // Its sums are rounded, or nothing but `rest` reads them.
        let consumes = is_half(self.dtype(found.out)) || (rest.is_some() && !self.escapes(found));
        let words = takes_hooks.then(|| self.in_words(found, (None, false)));
        match words.flatten() {
            Some(Ok(_)) => {
                return self.half_read(node, found, rest, (hook, consumes), around, true);
            }
            Some(Err(reason)) => around.no_pairs = Some(reason),
            None => {}
        }
        let epilogue = (hook.clone(), consumes);
        match self.in_pairs(found, epilogue).filter(|_| takes_hooks) {
            Some(Ok(emitted)) => {
                if let Some(dims) = block_dims(c, &emitted).filter(|_| hooked) {
                    return self.half_in_blocks(node, found, rest, (emitted, dims), around);
                }
                if rest.is_some() {
                    return Err(SplitReason::Blocks.into());
                }
                match self.in_pairs(found, (None, false)) {
                    Some(Ok(emitted)) => {
                        return self.half_whole(node, found, emitted, around, false);
                    }
                    Some(Err(reason)) => around.no_pairs = Some(reason),
                    None => {}
                }
            }
            Some(Err(reason)) => around.no_pairs = Some(reason),
            None => {}
        }
        if !takes_hooks {
            return match (rest, plain.refusal) {
                (Some(_), Some(reason)) => Err(SplitReason::Contraction(reason).into()),
                (Some(_), None) => Err(SplitReason::Halves.into()),
                (None, _) => self.half_whole(node, found, plain, around, true),
            };
        }
        self.half_read(node, found, rest, (hook, consumes), around, false)
    }

    /// A contraction whose operands are read on the way to the micro-kernel: two steps at a time `in_words`, else
    /// widened.
    fn half_read(
        &mut self,
        node: &Node,
        found: &Recognized,
        rest: Option<&Node>,
        (hook, consumes): (Option<String>, bool),
        mut around: Around,
        in_words: bool,
    ) -> Result<(), Stop> {
        let c = &found.contraction;
        let widening = match in_words {
            true => Hooks::default(),
            false => self.widening_hooks(found, &mut around),
        };
        let mut read = |epilogue: Option<String>| match in_words {
            true => match self.in_words(found, (epilogue, consumes)) {
                Some(emitted) => emitted.map_err(|reason| SplitReason::Contraction(reason).into()),
                None => Err(SplitReason::Halves.into()),
            },
            false => {
                let hooks = Hooks {
                    consumes: consumes && epilogue.is_some(),
                    epilogue,
                    ..widening.clone()
                };
                self.emitted(c, &hooks).map_err(|e| refused(node, e))
            }
        };
        let hooked = hook.is_some();
        let in_blocks = read(hook).and_then(|emitted: EmittedContraction| {
            let dims = block_dims(c, &emitted).filter(|_| hooked);
            Ok((emitted, dims.ok_or(SplitReason::Blocks)?))
        });
        match (in_blocks, rest) {
            (Ok(found_dims), _) => self.half_in_blocks(node, found, rest, found_dims, around),
            (Err(stop), Some(_)) => Err(stop),
            (Err(_), None) => {
                let emitted = read(None)?;
                self.half_whole(node, found, emitted, around, false)
            }
        }
    }

    /// The contraction with two steps of its reduction multiplied at a time, or why they cannot be; `None` if the
    /// target has no instructions for it, or the operands are not of bf16.
    fn in_words(
        &mut self,
        found: &Recognized,
        (epilogue, consumes): (Option<String>, bool),
    ) -> Option<Result<EmittedContraction, NoFastForm>> {
        let operands = [found.a, found.b].map(|id| self.dtype(id));
        let applies = self.pairs == Some(Pairs::Dots) && operands == [DType::BF16; 2];
        applies.then(|| {
            let hooks = Hooks {
                consumes: consumes && epilogue.is_some(),
                epilogue,
                ..Hooks::default()
            };
            let (c, known) = (&found.contraction, &self.target.known);
            let key = format!("{c:?} {hooks:?} {known:?}");
            if let Some(emitted) = self.emitted_words.get(&key) {
                return emitted.clone();
            }
            let emitted = contraction::emit_words(PLACEHOLDER, c, &hooks, &self.target);
            self.emitted_words.insert(key, emitted.clone());
            emitted
        })
    }

    /// Whether other kernels read the product.
    fn escapes(&self, found: &Recognized) -> bool {
        self.graph.container(found.out).storage != Storage::Local
    }

    /// The contraction by tiles of pairs of bf16 numbers, or why it does not fit them; `None` if the
    /// target has none, or the operands are not of bf16. `consumes` says whether only the epilogue reads the sums.
    fn in_pairs(
        &self,
        found: &Recognized,
        (epilogue, consumes): (Option<String>, bool),
    ) -> Option<Result<EmittedContraction, NoFastForm>> {
        let pairs = self.pairs.filter(|pairs| *pairs != Pairs::Dots)?;
        let operands = [found.a, found.b].map(|id| self.dtype(id));
        let hooks = Hooks {
            epilogue,
            consumes,
            ..Hooks::default()
        };
        let (c, target) = (&found.contraction, &self.target);
        (operands == [DType::BF16; 2])
            .then(|| contraction::emit_pairs(PLACEHOLDER, c, &hooks, target, pairs))
    }

    /// A contraction whose result is rounded by a launch of its own, and whose operands are widened by
    /// launches before it, if `widens`.
    fn half_whole(
        &mut self,
        node: &Node,
        found: &Recognized,
        emitted: EmittedContraction,
        mut around: Around,
        widens: bool,
    ) -> Result<(), Stop> {
        let mut operands = [Buffer::Container(found.a), Buffer::Container(found.b)];
        if widens {
            for (n, id) in [found.a, found.b].into_iter().enumerate() {
                self.widen_whole(n, id, &mut operands[n], &mut around)?;
            }
        }
        let product = self.product(found.out)?;
        if is_half(self.dtype(found.out)) {
            let symbol = format!("{PLACEHOLDER}_round");
            let len = self.elements(found.out)? as i64;
            let to = (FIRST + around.more.len(), self.dtype(found.out));
            around.after += &convert::whole(&symbol, len, (2, DType::F32), to);
            around.last_symbols.push(symbol);
            around.more.push(Buffer::Container(found.out));
        }
        self.push_half(node, emitted, (operands, product), around);
        Ok(())
    }

    fn widening_hooks(&self, found: &Recognized, around: &mut Around) -> Hooks {
        let mut hook = |buffer: usize, id: ContainerId| {
            let dtype = self.dtype(id);
            is_half(dtype).then(|| {
                let name = format!("{PLACEHOLDER}_widen{buffer}");
                around.before += &convert::prologue(&name, buffer, dtype);
                name
            })
        };
        Hooks {
            prologue_a: hook(0, found.a),
            prologue_b: hook(1, found.b),
            widens: [found.a, found.b].map(|id| Some(self.dtype(id)).filter(|d| is_half(*d))),
            ..Hooks::default()
        }
    }

    /// Replaces an operand by a copy in single precision.
    fn widen_whole(
        &mut self,
        position: usize,
        id: ContainerId,
        operand: &mut Buffer,
        around: &mut Around,
    ) -> Result<(), LowerError> {
        let dtype = self.dtype(id);
        if !is_half(dtype) {
            return Ok(());
        }
        let len = self.elements(id)?;
        let symbol = format!("{PLACEHOLDER}_widen{position}");
        let from = (FIRST + around.more.len(), dtype);
        around.before += &convert::whole(&symbol, len as i64, from, (position, DType::F32));
        around.first_symbols.push(symbol);
        around.more.push(Buffer::Container(id));
        if let Some(copy) = self.workspace(len * 4) {
            *operand = copy;
        }
        Ok(())
    }

    /// Where the sums are made: the result itself, or a workspace if it is to be rounded.
    fn product(&mut self, out: ContainerId) -> Result<Buffer, LowerError> {
        if !is_half(self.dtype(out)) {
            return Ok(Buffer::Container(out));
        }
        let len = self.elements(out)?;
        let workspace = self.workspace(len * 4);
        Ok(workspace.unwrap_or(Buffer::Container(out)))
    }

    /// A contraction whose final blocks are rounded, or consumed by `rest`, while they are in cache.
    fn half_in_blocks(
        &mut self,
        node: &Node,
        found: &Recognized,
        rest: Option<&Node>,
        (mut emitted, dims): (EmittedContraction, ProductRoles),
        mut around: Around,
    ) -> Result<(), Stop> {
        let dtype = self.dtype(found.out);
        let rounds = is_half(dtype);
        let escapes = self.escapes(found);
        let name = format!("{PLACEHOLDER}_block");
        let stores = rounds && (escapes || rest.is_none());
        let own = if stores {
            around.more.push(Buffer::Container(found.out));
            format!("{PLACEHOLDER}_rest")
        } else {
            name.clone()
        };
        let mut flops = 0;
        let mut in_place = None;
        if let Some(rest) = rest {
            let buffers = emit::Buffers {
                product: 2,
                first: FIRST + around.more.len(),
                pitch: emitted.pitch,
            };
            let replace = !escapes && !rounds;
            let graph = &self.graph;
            let epilogue = emit::emit_epilogue(graph, rest, found.out, replace, &dims, buffers)?;
            let epilogue = epilogue.ok_or(SplitReason::Elements)?;
            in_place = epilogue.in_place;
            if in_place.is_none() && !rounds && emitted.pitch.is_none() {
                self.graph.container_mut(found.out).storage = Storage::Global;
            }
            let args = epilogue.args.iter();
            around.more.extend(args.map(|id| Buffer::Container(*id)));
            around.before += &epilogue.text.replace(emit::NAME, &own);
            flops = operations(rest, 1);
            around.rest = work(rest, 1);
        }
        if stores {
            let then = rest.map(|_| own.as_str());
            around.before += &convert::store(&name, &dims, emitted.pitch, (FIRST, dtype), then);
        }
        let operands = [Buffer::Container(found.a), Buffer::Container(found.b)];
        let product = match (in_place, emitted.pitch) {
            (Some(id), _) => Buffer::Container(id),
            // This buffer is not read.
            (None, Some(_)) => operands[0],
            (None, None) => self.product(found.out)?,
        };
        let count = (FIRST + around.more.len()).to_string();
        emitted.source = emitted.source.replace(contraction::BUFFERS, &count);
        emitted.flops += flops;
        self.push_half(node, emitted, (operands, product), around);
        Ok(())
    }

    fn push_half(
        &mut self,
        node: &Node,
        emitted: EmittedContraction,
        (operands, product): ([Buffer; 2], Buffer),
        around: Around,
    ) {
        self.note(&emitted.choices);
        let main = emitted.launches.iter().map(|l| l.symbol.clone());
        let symbols: Vec<String> = around.first_symbols.iter().cloned().chain(main).collect();
        let symbols = [symbols, around.last_symbols].concat();
        let kernel = self.kernel(node, emitted.generator(), emitted.flops, symbols.len());
        self.kernels[kernel].work = KernelCost {
            product_ns: emitted.predicted_ns,
            ..around.rest
        };
        let scalar = |reason| ScalarForm::new(reason, emitted.flops, &self.target);
        self.kernels[kernel].scalar = emitted.refusal.map(scalar);
        self.kernels[kernel].no_pairs = around.no_pairs;
        self.kernels[kernel].uncut = around.uncut;
        let text = around.before + &emitted.source + &around.after;
        let source = self.source(node, text, symbols);
        let workspace = self.workspace(emitted.shared_scratch_bytes);
        self.scratch = self.scratch.max(emitted.thread_scratch_bytes);
        let [a, b] = operands;
        // A kernel without shared scratch does not read the fourth buffer.
        let mut args = vec![a, b, product, workspace.unwrap_or(product)];
        args.extend(around.more);
        for symbol in self.sources[source].symbols.clone() {
            self.launches
                .push((node.stage, source, symbol, args.clone(), kernel));
        }
    }
}

/// The product's dimensions, where its blocks come in the order of the output's strides. Any other result is
/// read again in the order it lies in memory.
fn block_dims(c: &Contraction, emitted: &EmittedContraction) -> Option<ProductRoles> {
    product_dims(c, &emitted.roles).filter(|_| emitted.finishes_in_blocks)
}
