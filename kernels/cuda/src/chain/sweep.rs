//! What each sweep over the columns computes: a reduction that needs another one's result comes a
//! sweep later, products out of tiles come in the last. Emits no text.

use super::form::Form;
use graph::{ContainerId, Reduction, SymExpr};
use kernels::emit::body::Statement;
use std::collections::{BTreeMap, BTreeSet};

/// A number for each row, reduced over the columns.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scalar {
    pub container: ContainerId,
    pub reduction: Reduction,
    /// The sweep that makes it.
    pub sweep: usize,
}

/// One pass over the columns.
#[derive(Clone, Debug, Default)]
pub(super) struct Sweep {
    /// Positions among [`Form::statements`], in order.
    pub statements: Vec<usize>,
    /// Positions among [`Form::tile_products`].
    pub products: BTreeSet<usize>,
    /// Whether products out of tiles are summed up and tiles stored.
    pub is_last: bool,
    /// Whether it goes along with the sweep before, block by block.
    pub is_joined: bool,
}

/// All sweeps and what they leave for each row.
#[derive(Clone, Debug)]
pub(super) struct Sweeps {
    pub sweeps: Vec<Sweep>,
    pub scalars: Vec<Scalar>,
}

impl Sweeps {
    /// The sweeps of a chain; `None` if a number of a row is needed before it is
    /// reduced, or at another row.
    pub(super) fn new(form: &Form) -> Option<Sweeps> {
        let mut scalars: Vec<Scalar> = Vec::new();
        // The first sweep that can compute a tile.
        let mut ready: BTreeMap<ContainerId, usize> = BTreeMap::new();
        let writes = form.statements.iter().flat_map(|s| &s.writes);
        let reduced = writes.filter(|w| w.conflict.is_some());
        let reduced: BTreeMap<ContainerId, &SymExpr> = reduced
            .map(|w| (w.place.container, &w.place.offset))
            .collect();
        for s in &form.statements {
            let mut sweep = 0;
            for read in &s.reads {
                let id = read.container;
                let scalar = scalars.iter().find(|k| k.container == id);
                sweep = match (scalar, reduced.get(&id)) {
                    (Some(scalar), Some(at)) if **at == read.offset => sweep.max(scalar.sweep + 1),
                    (_, Some(_)) => return None,
                    _ => sweep.max(ready.get(&id).copied().unwrap_or(0)),
                };
            }
            let write = &s.writes[0];
            let container = write.place.container;
            match write.conflict {
                None => _ = ready.insert(container, sweep),
                Some(reduction) => scalars.push(Scalar {
                    container,
                    reduction,
                    sweep,
                }),
            }
        }
        let reducing = scalars.iter().map(|s| s.sweep + 1).max().unwrap_or(0);
        let needed = last_tiles(form).map(|id| ready.get(&id));
        let out = needed.map(|sweep| sweep.copied().unwrap_or(0)).max();
        // Products out of tiles and stores join the last sweep that reduces, if it has what they need.
        let last = match out {
            Some(out) => out.max(reducing.saturating_sub(1)),
            None => reducing.checked_sub(1)?,
        };
        let sweep = |n| sweep(form, &scalars, n, n == last && out.is_some());
        Some(Sweeps {
            sweeps: (0..=last).map(sweep).collect(),
            scalars,
        })
    }

    /// The sweep's reductions, as positions among the scalars.
    pub(super) fn reduced(&self, sweep: usize) -> impl Iterator<Item = (usize, &Scalar)> {
        let all = self.scalars.iter().enumerate();
        all.filter(move |(_, s)| s.sweep == sweep)
    }
}

fn reductions(form: &Form) -> impl Iterator<Item = (usize, ContainerId)> {
    let writes = form.statements.iter().enumerate();
    writes.filter_map(|(n, s)| {
        let w = &s.writes[0];
        w.conflict.map(|_| (n, w.place.container))
    })
}

/// Tiles that are factors or stored.
fn last_tiles(form: &Form) -> impl Iterator<Item = ContainerId> {
    let factors = form.out_products.iter().map(|p| p.tile);
    factors.chain(form.stored.iter().copied())
}

/// What the sweep's reductions and products are made of, and no more.
fn sweep(form: &Form, scalars: &[Scalar], n: usize, is_last: bool) -> Sweep {
    let is_now = |id: &ContainerId| scalars.iter().any(|s| s.container == *id && s.sweep == n);
    let mut open: Vec<ContainerId> = Vec::new();
    let mut statements = BTreeSet::new();
    for (at, _) in reductions(form).filter(|(_, id)| is_now(id)) {
        statements.insert(at);
        open.extend(form.statements[at].reads.iter().map(|p| p.container));
    }
    if is_last {
        open.extend(last_tiles(form));
    }
    let mut products = BTreeSet::new();
    while let Some(id) = open.pop() {
        products.extend(form.tile_products.iter().position(|p| p.tile == id));
        let makes =
            |s: &Statement| s.writes[0].place.container == id && s.writes[0].conflict.is_none();
        if let Some(at) = form.statements.iter().position(makes)
            && statements.insert(at)
        {
            open.extend(form.statements[at].reads.iter().map(|p| p.container));
        }
    }
    Sweep {
        statements: statements.into_iter().collect(),
        products,
        is_last,
        is_joined: false,
    }
}
