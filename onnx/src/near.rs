//! Names that are similar to a wrong one: what the user may have meant.

/// Most names in a message.
const MOST: usize = 3;

/// The names that are most similar to `given`, best first; none if none is similar.
pub fn near<'n>(given: &str, names: impl IntoIterator<Item = &'n str>) -> Vec<&'n str> {
    // A third of the letters may be wrong; a part of a name is similar too.
    let most = (given.chars().count() / 3).max(1);
    let part = |name: &str| given.len() >= 3 && (name.contains(given) || given.contains(name));
    let mut found: Vec<(usize, &str)> = names
        .into_iter()
        .map(|name| (distance(given, name), name))
        .filter(|(n, name)| *n <= most || part(name))
        .collect();
    found.sort_unstable();
    found.dedup();
    found.into_iter().take(MOST).map(|(_, name)| name).collect()
}

/// ` (did you mean …?)`, or nothing if no name is similar to `given`.
pub fn suggestion<'n>(given: &str, names: impl IntoIterator<Item = &'n str>) -> String {
    match near(given, names).as_slice() {
        [] => String::new(),
        found => format!("; did you mean {}?", found.join(", ")),
    }
}

/// Letters to insert, remove or exchange. Takes time in the product of the lengths.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let exchanged = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = exchanged.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_names_are_those_with_few_other_letters_or_a_part_of_it() {
        let names = ["fold", "fold-shapes", "gemm", "gelu", "transposes"];
        assert_eq!(near("fodl", names), Vec::<&str>::new());
        assert_eq!(near("fld", names), ["fold"]);
        assert_eq!(near("fold-shape", names), ["fold-shapes", "fold"]);
        assert_eq!(near("transpose", names), ["transposes"]);
        assert_eq!(suggestion("gem", names), "; did you mean gemm?");
        assert_eq!(suggestion("zzz", names), "");
        assert_eq!(distance("kitten", "sitting"), 3);
    }
}
