//! Partitioned boolean quadratic problems: find one choice for each variable so that the sum of costs is least. There
//! is a cost for each choice, and one for each pair of choices of neighbouring variables.
//!
//! A variable with at most two neighbours is eliminated exactly: its best choice is a function of theirs, so its
//! costs move to the neighbour, or to an edge between the two (Scholz and Eckstein, "Register Allocation for
//! Irregular Architectures", LCTES 2002). This alone solves a problem without cycles inside cycles, such as a chain; on
//! a chain the solution is the shortest path. Elsewhere the search branches on the variable with most neighbours, first
//! on the choice with the least bound. It ends after a given number of branches, and then says how far the result may
//! be from the best. Variables keep their first choices unless others together cost less. Sums of whole numbers are
//! exact, so with whole costs the bound of the best choice is its cost. The same problem always gets the same answer.
//! Knows nothing of graphs and layouts.

use std::collections::{BTreeMap, BTreeSet};

/// Branches of a search, where the caller asks for no other number.
pub const USUAL_BRANCHES: usize = 2000;

/// Variables with choices, and costs between two of them. An infinite cost forbids.
#[derive(Clone, Debug, Default)]
pub struct Quadratic {
    /// The costs of the choices of each variable that is left.
    variables: BTreeMap<usize, Vec<f64>>,
    /// Costs of pairs of choices, by the two variables, the smaller number first.
    edges: BTreeMap<(usize, usize), Matrix>,
    /// A cost that every choice has.
    constant: f64,
}

/// Costs by the choice of the first and of the second variable.
#[derive(Clone, Debug, PartialEq)]
struct Matrix {
    n_columns: usize,
    costs: Vec<f64>,
}

/// A choice for each variable.
#[derive(Clone, Debug, PartialEq)]
pub struct Solution {
    /// The position of the choice of each variable, in the order in which they were added.
    pub choices: Vec<usize>,
    /// What they cost together.
    pub cost: f64,
    /// What every solution costs at least; `cost` if it is the best.
    pub bound: f64,
    /// Branches of the search; 0 if eliminating variables was enough.
    pub n_branches: usize,
}

impl Quadratic {
    /// Adds a variable with the costs of its choices, at least one. Returns its number.
    pub fn add_variable(&mut self, costs: Vec<f64>) -> usize {
        assert!(!costs.is_empty(), "a variable has a choice");
        let number = self.variables.len();
        self.variables.insert(number, costs);
        number
    }

    /// Adds the cost of each pair of choices of two variables.
    pub fn add_edge(&mut self, a: usize, b: usize, cost: impl Fn(usize, usize) -> f64) {
        assert!(a != b, "an edge has two ends");
        let sizes = [a, b].map(|v| self.variables[&v].len());
        let matrix = Matrix::new(sizes, cost);
        self.join(a, b, matrix);
    }

    /// Adds to the costs of a variable's choices.
    pub fn add_costs(&mut self, v: usize, added: &[f64]) {
        let costs = self.variables.get_mut(&v).into_iter().flatten();
        costs.zip(added).for_each(|(cost, more)| *cost += more);
    }

    /// Adds a cost that every choice has.
    pub fn add_constant(&mut self, cost: f64) {
        self.constant += cost;
    }

    /// What a choice for each variable costs.
    pub fn cost(&self, choices: &[usize]) -> f64 {
        let own = self.variables.iter().map(|(v, costs)| costs[choices[*v]]);
        let pairs = self.edges.iter();
        let pairs = pairs.map(|((a, b), m)| m.at(choices[*a], choices[*b]));
        self.constant + own.sum::<f64>() + pairs.sum::<f64>()
    }

    /// The best choices, or the best found in `max_branches` branches. Never more expensive than all first choices.
    pub fn solve(&self, max_branches: usize) -> Solution {
        let mut search = Search {
            left: max_branches,
            n_branches: 0,
        };
        let found = search.solve(self.clone());
        let mut choices: Vec<usize> = found.choices.into_values().collect();
        self.undo_idle_changes(&mut choices);
        // Sums in another order than the search's differ in the last digits.
        let cost = self.cost(&choices);
        Solution {
            cost,
            bound: found.bound.min(cost),
            n_branches: search.n_branches,
            choices,
        }
    }

    /// Gives connected variables their first choices again if these cost no more: the search takes any of equal
    /// choices, and one that ends early may take a worse one.
    fn undo_idle_changes(&self, choices: &mut [usize]) {
        let is_changed = |v: &&usize| choices[**v] != 0;
        let changed: BTreeSet<usize> = self.variables.keys().filter(is_changed).copied().collect();
        // Changes without an edge between them do not change each other's cost.
        for group in self.connected(&changed) {
            let before = self.cost_at(&group, choices);
            let changed: Vec<(usize, usize)> = group.iter().map(|v| (*v, choices[*v])).collect();
            group.iter().for_each(|v| choices[*v] = 0);
            if self.cost_at(&group, choices) > before {
                changed.iter().for_each(|(v, choice)| choices[*v] = *choice);
            }
        }
    }

    /// What choices cost at some variables and at their edges.
    fn cost_at(&self, variables: &BTreeSet<usize>, choices: &[usize]) -> f64 {
        let own = variables.iter().map(|v| self.variables[v][choices[*v]]);
        let edges = self.edges.iter();
        let edges = edges.filter(|((a, b), _)| variables.contains(a) || variables.contains(b));
        let edges = edges.map(|((a, b), m)| m.at(choices[*a], choices[*b]));
        own.sum::<f64>() + edges.sum::<f64>()
    }

    /// Adds a matrix to the edge between two variables.
    fn join(&mut self, a: usize, b: usize, matrix: Matrix) {
        let (key, matrix) = match a < b {
            true => ((a, b), matrix),
            false => ((b, a), matrix.transposed()),
        };
        match self.edges.get_mut(&key) {
            Some(known) => known.add(&matrix),
            None => drop(self.edges.insert(key, matrix)),
        }
    }

    /// A variable's neighbours with its edge to each, its own choices first.
    fn neighbours(&self, v: usize) -> Vec<(usize, Matrix)> {
        let own = self.edges.iter().filter(|((a, b), _)| *a == v || *b == v);
        own.map(|((a, b), m)| match *a == v {
            true => (*b, m.clone()),
            false => (*a, m.transposed()),
        })
        .collect()
    }

    fn degrees(&self) -> BTreeMap<usize, usize> {
        let mut degrees: BTreeMap<usize, usize> = self.variables.keys().map(|v| (*v, 0)).collect();
        for end in self.edges.keys().flat_map(|(a, b)| [a, b]) {
            *degrees.entry(*end).or_default() += 1;
        }
        degrees
    }

    /// Takes a variable out together with its edges.
    fn remove(&mut self, v: usize) -> Eliminated {
        let neighbours = self.neighbours(v);
        for (other, _) in &neighbours {
            self.edges.remove(&(v.min(*other), v.max(*other)));
        }
        Eliminated {
            variable: v,
            costs: self.variables.remove(&v).unwrap_or_default(),
            neighbours,
        }
    }

    /// Eliminates variables with at most two neighbours until there are none. Returns them in order of elimination.
    fn eliminate(&mut self) -> Vec<Eliminated> {
        let mut eliminated = Vec::new();
        loop {
            let degrees = self.degrees();
            // The smallest degree first: it costs least.
            let next = degrees.iter().min_by_key(|(v, degree)| (**degree, **v));
            let Some((v, _)) = next.filter(|(_, degree)| **degree <= 2) else {
                return eliminated;
            };
            let gone = self.remove(*v);
            match gone.neighbours.as_slice() {
                [] => self.constant += gone.best(&BTreeMap::new()).1,
                [(other, _)] => {
                    let n = self.variables[other].len();
                    let added = (0..n).map(|j| gone.best(&BTreeMap::from([(*other, j)])).1);
                    let added: Vec<f64> = added.collect();
                    self.add_costs(*other, &added);
                }
                [(first, _), (second, _)] => {
                    let sizes = [first, second].map(|o| self.variables[o].len());
                    let matrix = Matrix::new(sizes, |j, k| {
                        gone.best(&BTreeMap::from([(*first, j), (*second, k)])).1
                    });
                    self.join(*first, *second, matrix);
                }
                _ => unreachable!("the degree is at most 2"),
            }
            eliminated.push(gone);
        }
    }

    /// The problem in which a variable has taken a choice.
    fn with_choice(&self, v: usize, choice: usize) -> Quadratic {
        let mut rest = self.clone();
        let gone = rest.remove(v);
        rest.constant += gone.costs[choice];
        for (other, matrix) in &gone.neighbours {
            let row: Vec<f64> = matrix.row(choice).to_vec();
            rest.add_costs(*other, &row);
        }
        rest
    }

    /// Moves costs that every choice has from edges to variables, and from variables to the constant, which then is a
    /// lower bound.
    fn tighten(&mut self) {
        let keys: Vec<(usize, usize)> = self.edges.keys().copied().collect();
        for (a, b) in keys {
            for (own, other) in [(a, b), (b, a)] {
                let open: Vec<bool> = self.variables[&other]
                    .iter()
                    .map(|cost| cost.is_finite())
                    .collect();
                let Some(matrix) = self.edges.get_mut(&(a, b)) else {
                    continue;
                };
                let moved = matrix.take_least(own == a, &open);
                self.add_costs(own, &moved);
            }
        }
        for costs in self.variables.values_mut() {
            let least = costs.iter().copied().fold(f64::INFINITY, f64::min);
            self.constant += least;
            if least.is_finite() {
                costs.iter_mut().for_each(|cost| *cost -= least);
            }
        }
    }

    /// Parts without an edge between them; the constant goes to the first.
    fn parts(self) -> Vec<Quadratic> {
        let all: BTreeSet<usize> = self.variables.keys().copied().collect();
        let part = |own: BTreeSet<usize>| {
            let variables = own.iter().map(|v| (*v, self.variables[v].clone()));
            let edges = self.edges.iter().filter(|((a, _), _)| own.contains(a));
            Quadratic {
                variables: variables.collect(),
                edges: edges.map(|(key, m)| (*key, m.clone())).collect(),
                constant: 0.0,
            }
        };
        let mut parts: Vec<Quadratic> = self.connected(&all).into_iter().map(part).collect();
        if let Some(first) = parts.first_mut() {
            first.constant = self.constant;
        }
        parts
    }

    /// Some of the variables, grouped: those of different groups have no edge between them.
    fn connected(&self, among: &BTreeSet<usize>) -> Vec<BTreeSet<usize>> {
        let mut neighbours: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (a, b) in self.edges.keys() {
            if among.contains(a) && among.contains(b) {
                neighbours.entry(*a).or_default().push(*b);
                neighbours.entry(*b).or_default().push(*a);
            }
        }
        let (mut groups, mut seen) = (Vec::new(), BTreeSet::new());
        for v in among {
            if seen.contains(v) {
                continue;
            }
            let (mut own, mut open) = (BTreeSet::from([*v]), vec![*v]);
            while let Some(at) = open.pop() {
                for other in neighbours.get(&at).into_iter().flatten() {
                    if own.insert(*other) {
                        open.push(*other);
                    }
                }
            }
            seen.extend(own.iter().copied());
            groups.push(own);
        }
        groups
    }
}

impl Matrix {
    fn new([n_rows, n_columns]: [usize; 2], cost: impl Fn(usize, usize) -> f64) -> Matrix {
        let pairs = (0..n_rows).flat_map(|i| (0..n_columns).map(move |j| (i, j)));
        Matrix {
            n_columns,
            costs: pairs.map(|(i, j)| cost(i, j)).collect(),
        }
    }

    fn at(&self, row: usize, column: usize) -> f64 {
        self.costs[row * self.n_columns + column]
    }

    fn row(&self, row: usize) -> &[f64] {
        &self.costs[row * self.n_columns..][..self.n_columns]
    }

    fn n_rows(&self) -> usize {
        self.costs.len() / self.n_columns
    }

    fn transposed(&self) -> Matrix {
        Matrix::new([self.n_columns, self.n_rows()], |i, j| self.at(j, i))
    }

    fn add(&mut self, other: &Matrix) {
        let pairs = self.costs.iter_mut().zip(&other.costs);
        pairs.for_each(|(own, more)| *own += more);
    }

    /// Takes the least cost out of each row, or each column: what the choice costs whatever the choice at the other
    /// end. `open` says which choices at the other end are still possible.
    fn take_least(&mut self, of_rows: bool, open: &[bool]) -> Vec<f64> {
        let (n_rows, n_columns) = (self.n_rows(), self.n_columns);
        let n = if of_rows { n_rows } else { n_columns };
        let place = |i: usize, j: usize| match of_rows {
            true => i * n_columns + j,
            false => j * n_columns + i,
        };
        let mut moved = Vec::with_capacity(n);
        for i in 0..n {
            let possible = (0..open.len()).filter(|j| open[*j]);
            let least = possible
                .map(|j| self.costs[place(i, j)])
                .fold(f64::INFINITY, f64::min);
            for j in 0..open.len() {
                let cost = &mut self.costs[place(i, j)];
                // Such a choice is impossible by its own cost, so the matrix need not forbid it.
                *cost = if least.is_finite() {
                    *cost - least
                } else {
                    0.0
                };
            }
            moved.push(least);
        }
        moved
    }
}

/// A variable that was taken out, whose choice follows from its neighbours'.
struct Eliminated {
    variable: usize,
    costs: Vec<f64>,
    neighbours: Vec<(usize, Matrix)>,
}

impl Eliminated {
    /// Its best choice under the neighbours' choices, and what it costs.
    fn best(&self, choices: &BTreeMap<usize, usize>) -> (usize, f64) {
        let cost = |i: usize| {
            let edges = self.neighbours.iter();
            let edges = edges.map(|(other, m)| m.at(i, choices[other]));
            self.costs[i] + edges.sum::<f64>()
        };
        let each = (0..self.costs.len()).map(|i| (i, cost(i)));
        // Of equal choices, the first.
        each.reduce(|best, next| if next.1 < best.1 { next } else { best })
            .unwrap_or((0, 0.0))
    }
}

/// What was found for a problem: a choice for each variable, their cost, and a lower bound of the cost.
struct Found {
    choices: BTreeMap<usize, usize>,
    cost: f64,
    bound: f64,
}

struct Search {
    /// Branches that may still be opened.
    left: usize,
    n_branches: usize,
}

impl Search {
    fn solve(&mut self, mut problem: Quadratic) -> Found {
        let eliminated = problem.eliminate();
        let mut found = Found {
            choices: BTreeMap::new(),
            cost: 0.0,
            bound: 0.0,
        };
        if problem.variables.is_empty() {
            (found.cost, found.bound) = (problem.constant, problem.constant);
        }
        for part in problem.parts() {
            let own = self.branch(part);
            found.choices.extend(own.choices);
            found.cost += own.cost;
            found.bound += own.bound;
        }
        for gone in eliminated.iter().rev() {
            let (choice, _) = gone.best(&found.choices);
            found.choices.insert(gone.variable, choice);
        }
        found
    }

    /// Tries the choices of the variable with most neighbours.
    fn branch(&mut self, mut problem: Quadratic) -> Found {
        problem.tighten();
        let degrees = problem.degrees();
        let size = |v: &usize| problem.variables[v].len();
        let most = degrees
            .iter()
            .max_by_key(|(v, degree)| (**degree, std::cmp::Reverse((size(v), **v))));
        let Some((v, _)) = most else {
            unreachable!("a part has a variable");
        };
        let mut rests: Vec<(f64, usize, Quadratic)> = (0..size(v))
            .map(|choice| {
                let mut rest = problem.with_choice(*v, choice);
                rest.tighten();
                (rest.constant, choice, rest)
            })
            .collect();
        rests.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let mut best: Option<Found> = None;
        let mut bound = f64::INFINITY;
        for (least, choice, rest) in rests {
            let best_cost = best.as_ref().map_or(f64::INFINITY, |b| b.cost);
            // The first choice is followed even if no branch is left, so that there is a result.
            if best.is_some() && (least >= best_cost || self.left == 0) {
                bound = bound.min(least);
                continue;
            }
            self.left = self.left.saturating_sub(1);
            self.n_branches += 1;
            let mut found = self.solve(rest);
            bound = bound.min(found.bound.max(least));
            if found.cost < best_cost || best.is_none() {
                found.choices.insert(*v, choice);
                best = Some(found);
            }
        }
        let best = best.unwrap_or_else(|| unreachable!("the first choice is always followed"));
        Found {
            bound: bound.min(best.cost),
            ..best
        }
    }
}

#[cfg(test)]
mod tests;
