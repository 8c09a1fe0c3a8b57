//! Solutions beside all choices tried one by one, and chains beside the shortest path.

use super::{Quadratic, USUAL_BRANCHES};
use petgraph::algo::dijkstra;
use petgraph::graph::{DiGraph, NodeIndex};

/// Numbers that look random and are the same in every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % n
    }

    fn costs(&mut self, n: usize) -> Vec<f64> {
        self.costs_below(100, n)
    }

    fn costs_below(&mut self, end: usize, n: usize) -> Vec<f64> {
        (0..n).map(|_| self.below(end) as f64).collect()
    }
}

/// A problem of `n_variables` variables with two to four choices each; one pair in `sparse` has an edge.
fn random(seed: u64, n_variables: usize, sparse: usize) -> Quadratic {
    random_below(100, seed, n_variables, sparse)
}

/// The same with costs below `end`.
fn random_below(end: usize, seed: u64, n_variables: usize, sparse: usize) -> Quadratic {
    let mut numbers = Numbers(seed);
    let mut problem = Quadratic::default();
    let sizes: Vec<usize> = (0..n_variables).map(|_| 2 + numbers.below(3)).collect();
    for n in &sizes {
        let costs = numbers.costs_below(end, *n);
        problem.add_variable(costs);
    }
    for b in 0..n_variables {
        for a in 0..b {
            if numbers.below(sparse) == 0 {
                let costs = numbers.costs_below(end, sizes[a] * sizes[b]);
                problem.add_edge(a, b, |i, j| costs[i * sizes[b] + j]);
            }
        }
    }
    problem
}

/// The least cost of all choices.
fn brute_force(problem: &Quadratic) -> f64 {
    let sizes: Vec<usize> = problem.variables.values().map(Vec::len).collect();
    let mut choices = vec![0; sizes.len()];
    let mut least = f64::INFINITY;
    loop {
        least = least.min(problem.cost(&choices));
        let Some(at) = (0..sizes.len()).find(|at| choices[*at] + 1 < sizes[*at]) else {
            return least;
        };
        choices[at] += 1;
        choices[..at].fill(0);
    }
}

/// A chain of variables without costs of their own; each matrix has the costs of the edge between two neighbours.
struct Chain {
    n_choices: usize,
    steps: Vec<Vec<f64>>,
}

impl Chain {
    fn random(seed: u64, length: usize, n_choices: usize) -> Chain {
        let mut numbers = Numbers(seed);
        let steps = (0..length).map(|_| numbers.costs(n_choices * n_choices));
        Chain {
            n_choices,
            steps: steps.collect(),
        }
    }

    fn problem(&self) -> Quadratic {
        let mut problem = Quadratic::default();
        for _ in 0..=self.steps.len() {
            problem.add_variable(vec![0.0; self.n_choices]);
        }
        for (n, step) in self.steps.iter().enumerate() {
            problem.add_edge(n, n + 1, |i, j| step[i * self.n_choices + j]);
        }
        problem
    }

    /// The paper's graph: a node for each layout of each container, an edge for each configuration of an operator.
    fn shortest_path(&self) -> f64 {
        let mut graph: DiGraph<(), f64> = DiGraph::new();
        let (source, target) = (graph.add_node(()), graph.add_node(()));
        let mut layer =
            || -> Vec<NodeIndex> { (0..self.n_choices).map(|_| graph.add_node(())).collect() };
        let layers: Vec<Vec<NodeIndex>> = (0..=self.steps.len()).map(|_| layer()).collect();
        for node in &layers[0] {
            graph.add_edge(source, *node, 0.0);
        }
        for (n, step) in self.steps.iter().enumerate() {
            for (i, from) in layers[n].iter().enumerate() {
                for (j, to) in layers[n + 1].iter().enumerate() {
                    graph.add_edge(*from, *to, step[i * self.n_choices + j]);
                }
            }
        }
        for node in &layers[self.steps.len()] {
            graph.add_edge(*node, target, 0.0);
        }
        dijkstra(&graph, source, Some(target), |e| *e.weight())[&target]
    }
}

#[test]
fn a_chain_is_the_shortest_path() {
    for seed in 0..50 {
        let chain = Chain::random(seed, 4, 3);
        let problem = chain.problem();
        let found = problem.solve(0);
        assert_eq!(found.cost, chain.shortest_path(), "seed {seed}");
        assert_eq!(found.cost, brute_force(&problem), "seed {seed}");
        assert_eq!((found.bound, found.n_branches), (found.cost, 0));
    }
    // This chain is as long as the paper's encoder layer with its gradients, with all 24 orders of four dimensions.
    let long = Chain::random(7, 34, 24);
    let found = long.problem().solve(0);
    assert_eq!(found.cost, long.shortest_path());
    assert_eq!(found.cost, long.problem().cost(&found.choices));
}

#[test]
fn every_problem_is_solved_exactly() {
    for seed in 0..200 {
        let sparse = 1 + (seed as usize) % 4;
        let problem = random(seed, 7, sparse);
        let found = problem.solve(USUAL_BRANCHES);
        let least = brute_force(&problem);
        assert_eq!(found.cost, least, "seed {seed}");
        assert_eq!(found.cost, problem.cost(&found.choices), "seed {seed}");
        assert_eq!(found.bound, least, "seed {seed}");
    }
}

#[test]
fn an_empty_problem_costs_its_constant() {
    let mut problem = Quadratic::default();
    problem.add_constant(7.0);
    let found = problem.solve(USUAL_BRANCHES);
    assert_eq!((found.cost, found.bound, found.n_branches), (7.0, 7.0, 0));
    assert!(found.choices.is_empty());
}

#[test]
fn of_equal_choices_the_first_ones_stay() {
    let mut n_equal = 0;
    for seed in 0..2000 {
        // Few different costs, so that many choices are equal.
        let problem = random_below(2, seed, 6, 1);
        let first = vec![0; 6];
        let found = problem.solve(USUAL_BRANCHES);
        if problem.cost(&first) == found.cost {
            n_equal += 1;
            assert_eq!(found.choices, first, "seed {seed}");
        }
    }
    assert!(
        n_equal > 5,
        "{n_equal} problems are solved by their first choices"
    );
}

#[test]
fn a_search_that_ends_early_is_never_worse_than_the_first_choices() {
    for seed in 0..100 {
        let mut numbers = Numbers(seed);
        let mut problem = Quadratic::default();
        for _ in 0..9 {
            problem.add_variable(vec![0.0; 4]);
        }
        for b in 0..9 {
            for a in 0..b {
                // The pair of first choices is expensive; half of all other pairs are forbidden.
                let open: Vec<bool> = (0..16).map(|_| numbers.below(2) == 0).collect();
                problem.add_edge(a, b, |i, j| match (i + j, open[4 * i + j]) {
                    (0, _) => 1.0,
                    (_, true) => 0.0,
                    (_, false) => f64::INFINITY,
                });
            }
        }
        let first = problem.cost(&[0; 9]);
        for max_branches in [0, 1, 2] {
            let found = problem.solve(max_branches);
            assert!(found.cost <= first, "seed {seed}: {}", found.cost);
            assert!(found.bound <= found.cost, "seed {seed}");
        }
    }
}

#[test]
fn a_search_that_ends_early_bounds_the_best() {
    let mut n_open = 0;
    for seed in 0..50 {
        let problem = random(seed, 9, 1);
        let found = problem.solve(3);
        let least = brute_force(&problem);
        assert!(found.bound <= least, "seed {seed}");
        assert!(found.cost >= least, "seed {seed}");
        n_open += usize::from(found.bound < found.cost);
    }
    assert!(n_open > 10, "three branches are too few for most: {n_open}");
}

#[test]
fn forbidden_pairs_are_not_chosen() {
    for seed in 0..100 {
        let mut numbers = Numbers(seed);
        let mut problem = Quadratic::default();
        for _ in 0..6 {
            let costs = numbers.costs(4);
            problem.add_variable(costs);
        }
        for b in 0..6 {
            for a in 0..b {
                let shift = numbers.below(4);
                // Each choice of `a` allows two of four choices of `b`.
                let open = |i: usize, j: usize| (i + j + shift) % 4 < 2;
                problem.add_edge(a, b, |i, j| if open(i, j) { 0.0 } else { f64::INFINITY });
            }
        }
        let (found, least) = (problem.solve(USUAL_BRANCHES), brute_force(&problem));
        assert_eq!(found.cost, least, "seed {seed}");
    }
}

#[test]
fn parts_do_not_multiply_the_branches() {
    let mut problem = Quadratic::default();
    let mut numbers = Numbers(3);
    let n_parts = 12;
    for part in 0..n_parts {
        for _ in 0..4 {
            let costs = numbers.costs(3);
            problem.add_variable(costs);
        }
        let first = 4 * part;
        for (a, b) in [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)] {
            let costs = numbers.costs(9);
            problem.add_edge(first + a, first + b, |i, j| costs[3 * i + j]);
        }
    }
    let found = problem.solve(USUAL_BRANCHES);
    assert!(found.n_branches <= 3 * n_parts, "{}", found.n_branches);
    assert_eq!(found.bound, found.cost);
}
