//! Rows, columns, batch and reduction of a contraction, and the text of their index arithmetic.
//! Decides the order in which dims are counted; chooses no tiles.

use super::Unsupported;
use kernels::contraction::Contraction;
use kernels::contraction::access::{Access, Problem};
use kernels::contraction::gather::{ZeroFill, gather_form};

/// A contraction whose output positions are each written once: dims by role, slowest first.
#[derive(Clone, Debug)]
pub(super) struct Form {
    pub sizes: Vec<i64>,
    pub batch: Vec<usize>,
    pub m: Vec<usize>,
    pub n: Vec<usize>,
    pub k: Vec<usize>,
    pub a: Access,
    pub b: Access,
    pub out: Access,
}

/// What together writes the output.
pub(super) struct Forms {
    pub parts: Vec<Form>,
    pub zeros: Vec<ZeroFill>,
}

/// Splits `c` by output phases and sorts its dims by role.
pub(super) fn forms(c: &Contraction) -> Result<Forms, Unsupported> {
    let n_terms = c.dims.iter().try_fold(1, |n: i64, d| n.checked_mul(*d));
    // The product of some dims is at most that of all, and twice the latter is counted as work.
    if n_terms.is_none_or(|n| n > i64::MAX / 4) {
        return Err(Unsupported::TooLarge {
            what: "multiplications",
            count: n_terms.unwrap_or(i64::MAX),
        });
    }
    let gathered = gather_form(Problem::new(c)).map_err(|reason| Unsupported::Form { reason })?;
    let parts = gathered
        .parts
        .into_iter()
        .map(Form::new)
        .collect::<Vec<_>>();
    for p in &parts {
        let roles = [
            ("rows", &p.m),
            ("columns", &p.n),
            ("terms", &p.k),
            ("products", &p.batch),
        ];
        for (what, dims) in roles {
            let count = p.count(dims);
            if count > i64::from(i32::MAX) / 4 {
                return Err(Unsupported::TooLarge { what, count });
            }
        }
    }
    Ok(Forms {
        parts,
        zeros: gathered.zeros,
    })
}

impl Form {
    fn new(mut p: Problem) -> Self {
        p.tidy();
        let (mut batch, mut m, mut n, mut k) = (vec![], vec![], vec![], vec![]);
        for d in (0..p.dims.len()).filter(|&d| p.dims[d] > 1) {
            match (p.out.has(d), p.a.has(d), p.b.has(d)) {
                (true, true, true) => batch.push(d),
                (true, false, true) => n.push(d),
                (true, ..) => m.push(d),
                (false, ..) => k.push(d),
            }
        }
        let by_out = |d: &usize| std::cmp::Reverse(p.out.stride(*d));
        for role in [&mut batch, &mut m, &mut n] {
            role.sort_by_key(by_out);
        }
        // The dim along which an operand is contiguous counts fastest, so that neighbouring threads
        // read neighbouring elements.
        last_if_contiguous(&mut m, &p.a);
        last_if_contiguous(&mut n, &p.b);
        last_if_contiguous(&mut k, &p.b);
        last_if_contiguous(&mut k, &p.a);
        Form {
            sizes: p.dims,
            batch,
            m,
            n,
            k,
            a: p.a,
            b: p.b,
            out: p.out,
        }
    }

    /// Number of points of the dims together.
    pub fn count(&self, dims: &[usize]) -> i64 {
        dims.iter().map(|&d| self.sizes[d]).product()
    }

    /// Whether an address may need 64 bits.
    pub fn is_wide(&self) -> bool {
        let reach = |x: &Access| {
            let over = |d: usize| (x.stride(d) * (self.sizes[d] - 1)).abs();
            constant(x).abs() + (0..self.sizes.len()).map(over).sum::<i64>()
        };
        [&self.a, &self.b, &self.out]
            .into_iter()
            .any(|x| reach(x) >= 1 << 30)
    }

    /// The sum of `coeff(d) * digit` over the digits of `index`, which counts `dims`.
    pub fn linear(
        &self,
        index: &str,
        dims: &[usize],
        coeff: impl Fn(usize) -> i64,
        wide: bool,
    ) -> String {
        let cast = if wide { "(long long)" } else { "" };
        let term = |(i, &d): (usize, &usize)| {
            let k = coeff(d);
            (k != 0).then(|| format!("{cast}{}*{}", self.digit(index, dims, i), signed(k)))
        };
        let terms: Vec<String> = dims.iter().enumerate().filter_map(term).collect();
        if terms.is_empty() {
            "0".to_string()
        } else {
            terms.join(" + ")
        }
    }

    fn digit(&self, index: &str, dims: &[usize], i: usize) -> String {
        let below = self.count(&dims[i + 1..]);
        let mut s = index.to_string();
        if below > 1 {
            s = format!("{s}/{below}");
        }
        if i > 0 {
            s = format!("{s}%{}", self.sizes[dims[i]]);
        }
        format!("({s})")
    }

    /// Elements of `x` that may be read at once along the fastest of `dims`: 1 or `width`.
    pub fn contiguous(&self, x: &Access, dims: &[usize], width: i64) -> bool {
        let Some(&fast) = dims.last() else {
            return false;
        };
        let guarded = x.coords.iter().any(|c| c.guarded && c.coeff(fast) != 0);
        let others = (0..self.sizes.len()).filter(|&d| d != fast && self.sizes[d] > 1);
        !guarded
            && x.stride(fast) == 1
            && self.sizes[fast] % width == 0
            && constant(x) % width == 0
            && others.into_iter().all(|d| x.stride(d) % width == 0)
    }
}

fn last_if_contiguous(dims: &mut Vec<usize>, x: &Access) {
    if let Some(i) = dims.iter().position(|&d| x.stride(d) == 1) {
        let d = dims.remove(i);
        dims.push(d);
    }
}

/// The address where every dim is zero.
pub(super) fn constant(x: &Access) -> i64 {
    x.base + x.coords.iter().map(|c| c.offset * c.stride).sum::<i64>()
}

/// A number as C text that may follow any operator.
pub(super) fn signed(k: i64) -> String {
    if k < 0 {
        format!("({k})")
    } else {
        k.to_string()
    }
}

/// `a / b` rounded up.
pub(super) fn ceil(a: i64, b: i64) -> i64 {
    (a + b - 1) / b
}
