//! Numbers for people: bytes and counts with units.

/// `1.5 MiB`
pub fn bytes(n: i64) -> String {
    scaled(n as f64, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB"])
}

/// `25.6 M`
pub fn count(n: f64) -> String {
    scaled(n, 1000.0, &["", "k", "M", "G", "T"])
        .trim_end()
        .to_string()
}

fn scaled(n: f64, step: f64, units: &[&str]) -> String {
    let (mut value, mut unit) = (n, 0);
    while value.abs() >= step && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }
    let digits = usize::from(unit > 0);
    format!("{value:.digits$} {}", units[unit])
}

/// Rows with columns aligned: the first and last to the left, those between to the right.
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| {
        rows.iter()
            .filter_map(|r| r.get(c))
            .map(|s| s.chars().count())
            .max()
    };
    let widths: Vec<usize> = (0..columns).map(|c| width(c).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in rows {
        let cells: Vec<String> = row
            .iter()
            .enumerate()
            .map(|(c, cell)| {
                let width = widths[c];
                if c == 0 || c + 1 == columns {
                    format!("{cell:<width$}")
                } else {
                    format!("{cell:>width$}")
                }
            })
            .collect();
        text.push_str("  ");
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        assert_eq!(bytes(12), "12 B");
        assert_eq!(bytes(3 << 19), "1.5 MiB");
        assert_eq!(count(25_557_032.0), "25.6 M");
        assert_eq!(count(7.0), "7");
    }

    #[test]
    fn columns_are_aligned() {
        let row = |a: &str, b: &str, c: &str| vec![a.to_string(), b.to_string(), c.to_string()];
        let text = table(&[row("a", "1", "x"), row("bb", "10", "")]);
        assert_eq!(text, "  a    1  x\n  bb  10\n");
    }
}
