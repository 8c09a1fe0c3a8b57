//! The epilogue of a contraction as CUDA text: element-wise work on a finished sum in a register.
//!
//! Owns the condition under which a map can be one, and the function's frame. A map is an epilogue if
//! each of its points reads the product at one element, a different one for each point and each
//! element once, and writes without resolving conflicts. Then its points may run in any order and
//! as soon as their element is final. What a point makes may be several containers. Never decides
//! how the product is computed.

use crate::contraction::{Epilogue, Types, declaration};
use crate::value_text::{ValueText, cast, value_type};
use crate::{Param, ParamType, element_type};
use graph::{ContainerId, Graph, Node, Storage, SymExpr};
use kernels::emit::body::{self, Body, Kernel, Statement};
use kernels::emit::index::{Loop, coefficient};
use kernels::emit::prepared;
use kernels::emit::text::CText;
use kernels::emit::values::{Address, Effect, Op, Values};
use kernels::lower::LowerError;
use kernels::plan::Buffer;
use kernels::recognize::Recognized;
use std::collections::BTreeMap;

/// The map `rest` as epilogue of what computes a product; `None` if it cannot be one. The product
/// itself is stored too if it is `kept`.
///
/// # Errors
/// As for any map.
pub(super) fn of(
    graph: &Graph,
    rest: &Node,
    product: &Recognized,
    types: Types,
    kept: bool,
) -> Result<Option<Epilogue>, LowerError> {
    let kernel = prepared(body::kernel_of(graph, rest, true)?);
    let epilogue = points(&kernel, product.out)
        .and_then(|points| points.epilogue(graph, product, types))
        .map(|epilogue| Epilogue {
            keeps_product: kept,
            ..epilogue
        });
    Ok(epilogue)
}

/// A kernel's statements, each run once for each element of the product.
pub(super) struct Points<'k> {
    kernel: &'k Kernel,
    pub(super) loops: Vec<Loop>,
    pub(super) statements: &'k [Statement],
    /// The element of the product that a point reads.
    pub(super) at: SymExpr,
}

/// A kernel that is one nest without conflicts, with the product read at one place.
pub(super) fn points(kernel: &Kernel, product: ContainerId) -> Option<Points<'_>> {
    let [nest] = kernel.phases.as_slice() else {
        return None;
    };
    let Body::Leaf(statements) = &nest.body else {
        return None;
    };
    let mut writes = statements.iter().flat_map(|s| &s.writes);
    if writes.any(|w| {
        let scattered = !w.place.guards.is_empty() || !w.place.gather.is_empty();
        w.conflict.is_some() || scattered || w.place.container == product
    }) {
        return None;
    }
    let reads = statements.iter().flat_map(|s| &s.reads);
    let mut at: Option<SymExpr> = None;
    for p in reads.filter(|p| p.container == product) {
        let plain = p.gather.is_empty() && p.guards.is_empty();
        if !plain || at.as_ref().is_some_and(|known| *known != p.offset) {
            return None;
        }
        at = Some(p.offset.clone());
    }
    let at = at?;
    let loops: Vec<Loop> = kernel.outer.iter().chain(&nest.loops).cloned().collect();
    let len = kernel.arrays[&product].len;
    covers(&at, &loops, len).then_some(Points {
        kernel,
        loops,
        statements,
        at,
    })
}

/// Whether `at` takes each value in `[0, len)` once: the loops are digits of a mixed-radix number.
fn covers(at: &SymExpr, loops: &[Loop], len: i64) -> bool {
    let digit = |l: &Loop| coefficient(at, &l.var).map(|c| (c, l.size));
    let Some(mut digits) = loops.iter().map(digit).collect::<Option<Vec<_>>>() else {
        return false;
    };
    let linear = loops.iter().fold(SymExpr::default(), |sum, l| {
        let c = coefficient(at, &l.var);
        let c = c.unwrap_or_else(|| unreachable!("each loop has a digit"));
        sum + SymExpr::from(&l.var) * c
    });
    digits.sort_unstable();
    let mut weight = 1;
    for (c, size) in digits {
        if c != weight {
            return false;
        }
        weight *= size;
    }
    linear == *at && weight == len
}

impl Points<'_> {
    fn epilogue(&self, graph: &Graph, product: &Recognized, types: Types) -> Option<Epilogue> {
        let values = Values::new(&self.loops, self.statements, &self.kernel.arrays);
        let stored: Vec<&Effect> = values
            .effects
            .iter()
            .filter(|e| graph.container(e.address.container).storage != Storage::Local)
            .collect();
        let written = |id: &ContainerId| values.effects.iter().any(|e| e.address.container == *id);
        // What another point made is not there yet.
        if values.loaded.iter().any(written) {
            return None;
        }
        let (mut params, mut args, mut names) = (Vec::new(), Vec::new(), BTreeMap::new());
        let loaded = values.loaded.iter().filter(|id| **id != product.out);
        let outputs = stored.iter().map(|e| e.address.container);
        let mut used: Vec<ContainerId> = loaded.copied().chain(outputs).collect();
        used.sort_unstable();
        used.dedup();
        for id in used {
            let name = format!("x{}", params.len());
            let dtype = self.kernel.arrays[&id].dtype;
            let ty = match written(&id) {
                true => ParamType::Out(dtype),
                false => ParamType::In(dtype),
            };
            names.insert(id, name.clone());
            params.push(Param { name, ty });
            args.push(Buffer::Container(id));
        }
        let text = ValueText {
            values: &values,
            extents: &self.kernel.extents,
            names: &names,
        };
        Some(Epilogue {
            text: self.function(&text, &stored, &params, product, types),
            params,
            args,
            keeps_product: false,
        })
    }

    fn function(
        &self,
        text: &ValueText<'_>,
        stored: &[&Effect],
        params: &[Param],
        product: &Recognized,
        types: Types,
    ) -> String {
        let n_axes = product.contraction.out.axes.len();
        let sum = element_type(types.sum());
        let mut signature = vec![format!("{sum} value"), "long long at".to_string()];
        signature.extend((0..n_axes).map(|i| format!("int c{i}")));
        signature.extend(params.iter().map(declaration));
        let mut t = CText::default();
        t.open(&format!("SH_FN void EPILOGUE({})", signature.join(", ")));
        let index = self.index_type(text.values);
        for l in &self.loops {
            t.line(&format!(
                "const {index} {} = {};",
                l.var,
                self.digit(l, product)
            ));
        }
        for (n, value) in text.values.values.iter().enumerate() {
            let ctype = value_type(value.dtype);
            let made = match &value.op {
                Op::Const(_) => continue,
                // Rounded as if it had been to memory, where another map may read it.
                Op::Load(a) if a.container == product.out => {
                    cast("value", types.sum(), value.dtype)
                }
                _ => text.computation(n),
            };
            t.line(&format!("const {ctype} t{n} = {made};"));
        }
        for e in stored {
            let (place, value) = (text.element(&e.address), text.operand(e.value));
            t.line(&format!("{place} = {value};"));
        }
        t.close();
        t.finish()
    }

    /// Elements of the product between a loop's points.
    pub(super) fn weight(&self, l: &Loop) -> i64 {
        let weight = coefficient(&self.at, &l.var);
        weight.unwrap_or_else(|| unreachable!("the loops are digits of the product's element"))
    }

    /// A loop's position as text: along an axis of the product, or within its memory.
    fn digit(&self, l: &Loop, product: &Recognized) -> String {
        let weight = self.weight(l);
        let mut axes = product.contraction.out.axes.iter();
        match axes.position(|axis| axis.stride == weight && axis.size == l.size) {
            Some(axis) => format!("c{axis}"),
            None => format!("at / {weight} % {}", l.size),
        }
    }

    /// The type that holds every index: 32 bits where they suffice.
    fn index_type(&self, values: &Values) -> &'static str {
        const MOST: i64 = 1 << 30;
        let small = |e: &SymExpr| {
            let (lo, hi) = self.kernel.extents.interval(e);
            lo > -MOST && hi < MOST
        };
        let fits = |a: &Address| {
            small(&a.offset) && a.guards.iter().all(|g| small(&g.index)) && a.gather.is_empty()
        };
        let mut made = values.values.iter().map(|v| match &v.op {
            Op::Load(a) => fits(a),
            Op::Index(e) => small(e),
            _ => true,
        });
        let stored = values.effects.iter().all(|e| fits(&e.address));
        if stored && made.all(|fits| fits) {
            "int"
        } else {
            "long"
        }
    }
}
