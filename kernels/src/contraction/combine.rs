//! The last launch of a contraction whose results went to shared scratch: sums the parts of the
//! reduction and moves the sums to the output.

use super::driver::{GatherPart, decode, strided};
use super::groups::GroupDim;
use super::text::{CText, affine};

impl GatherPart<'_> {
    /// Sums the parts and moves them to the output: blocks of columns, rows in the output's order.
    pub(super) fn combine_function(&self, t: &mut CText) {
        let (p, s) = (&self.plan, &self.plan.shape);
        let columns = p.nr().min(16);
        let number = self.number();
        let m_row = self.o_strides();
        let mut order: Vec<usize> = (0..s.m.len()).collect();
        order.sort_by_key(|&j| std::cmp::Reverse(s.m[j].o));
        let (outer_m, inner_m) = (order[0], &order[1..]);
        let size = p.n_inner().size;
        let col_blocks = (size + columns - 1) / columns;
        let n_outer = p.panels() / p.inner_panels();
        let diagonal = s.diagonal.as_ref().and_then(|d| match d.place {
            GroupDim::Rows(at) => Some((d, at)),
            GroupDim::Reduction(_) => None,
        });
        // If rows count through groups, each column takes the rows of its own group.
        let m_size = |j: usize| match diagonal {
            Some((d, at)) if at == j => d.inside,
            _ => s.m[j].size,
        };
        let units = self.batches() * n_outer * col_blocks * m_size(outer_m);
        t.line(format!(
            "static void {}_combine(void *const *buf, void *scratch, long tid, long nt) {{",
            self.prefix
        ));
        t.line(format!(
            "(void)scratch; const {number} *R = (const {number} *)buf[3] + {}L;",
            self.shared_at + self.packed_numbers()
        ));
        t.line(format!("{number} *O = ({number} *)buf[2] + {}L;", s.o_base));
        t.line(format!(
            "for (long u = {units}L*tid/nt; u < {units}L*(tid + 1)/nt; u++) {{"
        ));
        let rows = m_size(outer_m);
        t.line(format!(
            "const long y{outer_m} = u%{rows}L, cb = u/{rows}L%{col_blocks}L;"
        ));
        t.line(format!(
            "const long po = u/{}L%{n_outer}L, bt = u/{}L;",
            rows * col_blocks,
            rows * col_blocks * n_outer
        ));
        let batch = decode(t, &s.batch, "bt", "bt");
        let outer = decode(t, &s.n[..s.n.len() - 1], "po", "po");
        t.line(format!(
            "const long n0 = cb*{columns}L, n1 = shl_min(n0 + {columns}L, {size}L);"
        ));
        for &j in inner_m {
            t.line(format!(
                "for (long y{j} = 0; y{j} < {}L; y{j}++) {{",
                m_size(j)
            ));
        }
        let mut from: Vec<(String, i64)> =
            order.iter().map(|&j| (format!("y{j}"), m_row[j])).collect();
        let panel = self.m_total() * p.nr();
        from.push((
            format!("(po*{}L + n0/{}L)", p.inner_panels(), p.nr()),
            panel,
        ));
        from.push((format!("n0%{}L", p.nr()), 1));
        from.push(("bt".to_string(), self.m_total() * self.result_row()));
        let mut to: Vec<(String, i64)> =
            order.iter().map(|&j| (format!("y{j}"), s.m[j].o)).collect();
        to.extend(strided(&batch, &s.batch, |d| d.o));
        to.extend(strided(&outer, &s.n, |d| d.o));
        if diagonal.is_none() {
            to.push(("n0".to_string(), p.n_inner().o));
        }
        t.line(format!("const {number} *r = R + {};", affine(&from, 0)));
        t.line(format!("{number} *o = O + {};", affine(&to, 0)));
        let part = self.batches() * self.m_total() * self.result_row();
        let (mut here, mut there) = ("n".to_string(), format!("n*{}L", p.n_inner().o));
        if let Some((d, at)) = diagonal {
            there = d.column("(n0 + n)");
            let group = d.source_step(m_row[at]);
            here = format!("n + (n0 + n)/{}L*{group}L", d.columns);
        }
        let sum: Vec<String> = (0..p.parts)
            .map(|q| format!("r[{here} + {}L]", q * part))
            .collect();
        t.line(format!(
            "for (long n = 0; n < n1 - n0; n++) o[{there}] = {};",
            sum.join(" + ")
        ));
        t.close(inner_m.len());
        if let Some(e) = &self.hooks.epilogue {
            let inner: i64 = inner_m.iter().map(|&j| s.m[j].size).product();
            let (batch, first) = self.epilogue_batch();
            let n_at = format!("{first}po*{size}L");
            t.line(format!("{e}(buf, tid, {batch}, y{outer_m}*{inner}L, (y{outer_m} + 1)*{inner}L, {n_at} + n0, {n_at} + n1);"));
        }
        t.close(2);
    }
}
