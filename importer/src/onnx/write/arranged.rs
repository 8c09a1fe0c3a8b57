//! Expressions arranged so that fewer passes over memory compute them.
//!
//! Each operation of a written expression is a node, and each node of a large value is a pass. Before:
//! `((dy·t + (dy/√2·1.13·exp(−z·z))·x)·0.5`, ten passes. After: `dy·(t·0.5 + exp(c − z·z)·x)`, seven. Both
//! are the same up to rounding. Only for single and double precision, because constants are rounded to the
//! type. Never changes an expression with choices or positions.

use graph::{Binary, Expr, Unary};

/// The expression with common operands factored out of sums, and constants moved to where they cost nothing.
pub(super) fn arranged(e: &Expr) -> Expr {
    match is_arithmetic(e) {
        true => arrange(e),
        false => e.clone(),
    }
}

/// Whether it is made of real arithmetic only.
fn is_arithmetic(e: &Expr) -> bool {
    match e {
        Expr::In(_) => true,
        Expr::Const(_) => e.as_number().is_some(),
        // A function with steps may give another step if its operand is rounded in another way.
        Expr::Unary(f, a) => {
            use Unary::*;
            let is_step = matches!(f, Not | IsNan | Floor | Ceil | Round | Trunc | Sign);
            !is_step && is_arithmetic(a)
        }
        Expr::Binary(f, a, b) => {
            use Binary::*;
            matches!(f, Add | Sub | Mul | Div | Pow) && is_arithmetic(a) && is_arithmetic(b)
        }
        _ => false,
    }
}

fn arrange(e: &Expr) -> Expr {
    match e {
        Expr::Binary(f @ (Binary::Add | Binary::Sub), a, b) => {
            common_taken_out(*f, arrange(a), arrange(b))
        }
        Expr::Binary(Binary::Mul, a, b) if a != b => ScaledProduct::of(e).placed(),
        Expr::Binary(Binary::Div, _, b) if is_divisor(b) => match ScaledProduct::of(e) {
            // There is no other factor to combine it with.
            product if product.parts.len() < 2 && !product.absorbs() => arranged_parts(e),
            product => product.placed(),
        },
        _ => arranged_parts(e),
    }
}

/// Whether it is a number whose inverse is one.
fn is_divisor(e: &Expr) -> bool {
    e.as_number().is_some_and(|n| n != 0.0 && n.is_finite())
}

/// The expression of arranged operands.
fn arranged_parts(e: &Expr) -> Expr {
    match e {
        Expr::Unary(f, a) => Expr::unary(*f, arrange(a)),
        Expr::Binary(f, a, b) => Expr::binary(*f, arrange(a), arrange(b)),
        _ => e.clone(),
    }
}

/// `a·x ± b·x = x·(a ± b)` for an operand x.
fn common_taken_out(f: Binary, a: Expr, b: Expr) -> Expr {
    let (left, right) = (
        ScaledProduct::of_arranged(&a),
        ScaledProduct::of_arranged(&b),
    );
    let shared = |part: &&Expr| matches!(part, Expr::In(_)) && right.parts.contains(part);
    match left.parts.iter().find(shared).cloned() {
        Some(x) if left.parts.len() == 1 && right.parts.len() == 1 => {
            let right = match f {
                Binary::Sub => -right.number,
                _ => right.number,
            };
            times(left.number + right, x)
        }
        Some(x) => {
            let rest = Expr::binary(f, left.without(&x).placed(), right.without(&x).placed());
            x.mul(rest)
        }
        None => Expr::binary(f, a, b),
    }
}

/// A number times expressions that are not products.
struct ScaledProduct {
    number: f64,
    parts: Vec<Expr>,
}

impl ScaledProduct {
    /// Splits an expression's arranged factors.
    fn of(e: &Expr) -> ScaledProduct {
        let mut product = ScaledProduct {
            number: 1.0,
            parts: Vec::new(),
        };
        product.multiply(e, &arrange);
        product
    }

    /// The same for an expression that is arranged already.
    fn of_arranged(e: &Expr) -> ScaledProduct {
        let mut product = ScaledProduct {
            number: 1.0,
            parts: Vec::new(),
        };
        product.multiply(e, &Expr::clone);
        product
    }

    /// Multiplies with the factors of an expression. Squares stay whole: a square is often computed anyway.
    fn multiply(&mut self, e: &Expr, part: &dyn Fn(&Expr) -> Expr) {
        match (e, e.as_number()) {
            (_, Some(number)) => self.number *= number,
            (Expr::Binary(Binary::Mul, a, b), _) if a != b => {
                self.multiply(a, part);
                self.multiply(b, part);
            }
            (Expr::Binary(Binary::Div, a, b), _) if is_divisor(b) => {
                self.number /= b.as_number().unwrap_or(1.0);
                self.multiply(a, part);
            }
            (Expr::Unary(Unary::Neg, a), _) => {
                self.number = -self.number;
                self.multiply(a, part);
            }
            _ => {
                let part = part(e);
                match part == *e {
                    true => self.parts.push(part),
                    // Arranged, it may be a product itself.
                    false => self.multiply(&part, &Expr::clone),
                }
            }
        }
    }

    /// Returns the product without one of the parts that equal `x`.
    fn without(mut self, x: &Expr) -> ScaledProduct {
        if let Some(at) = self.parts.iter().position(|part| part == x) {
            self.parts.remove(at);
        }
        self
    }

    /// Whether one of the parts can absorb a number without an additional pass.
    fn absorbs(&self) -> bool {
        let number = self.number;
        self.parts
            .iter()
            .any(|part| taken_in(part, number).is_some())
    }

    /// The product with its number where it costs least: in a part that absorbs it, or else multiplied with the last
    /// part that is computed.
    fn placed(mut self) -> Expr {
        let number = self.number;
        if number != 1.0 {
            let within = |part: &Expr| taken_in(part, number);
            let taken = self.parts.iter().enumerate();
            let taken = taken
                .filter_map(|(at, part)| Some((at, within(part)?)))
                .next();
            let computed = |part: &Expr| !matches!(part, Expr::In(_));
            match (taken, self.parts.iter().rposition(computed)) {
                (Some((at, part)), _) => self.parts[at] = part,
                (None, Some(at)) => self.parts[at] = times(number, self.parts[at].clone()),
                (None, None) => match self.parts.first() {
                    Some(first) => self.parts[0] = times(number, first.clone()),
                    None => return Expr::float(number),
                },
            }
        }
        let product = self.parts.into_iter().reduce(Expr::mul);
        product.unwrap_or(Expr::float(1.0))
    }
}

fn times(number: f64, e: Expr) -> Expr {
    match number {
        -1.0 => e.neg(),
        _ => Expr::float(number).mul(e),
    }
}

/// The most that may be added to an exponent, because the sum's rounding error is a relative error of the power.
const MOST_SHIFT: f64 = 1.0;

/// `number·e` in as many passes as `e`, except for passes that other expressions share: `c·exp(−q) = exp(ln c − q)`
/// for c near 1, and sums of which one side absorbs the number.
fn taken_in(e: &Expr, number: f64) -> Option<Expr> {
    match e {
        Expr::Unary(Unary::Exp, power) if number > 0.0 && number.is_finite() => {
            let (shift, below) = match power.as_ref() {
                Expr::Unary(Unary::Neg, q) => (0.0, q),
                Expr::Binary(Binary::Sub, c, q) => (c.as_number()?, q),
                _ => return None,
            };
            let shift = shift + number.ln();
            let shifted = Expr::float(shift).sub(below.as_ref().clone());
            (shift.abs() <= MOST_SHIFT).then(|| shifted.exp())
        }
        Expr::Binary(f @ (Binary::Add | Binary::Sub), a, b) => {
            let (left, right) = (ScaledProduct::of_arranged(a), ScaledProduct::of_arranged(b));
            let is_number = |p: &ScaledProduct| p.parts.is_empty();
            if is_number(&left) || is_number(&right) {
                return None;
            }
            let scaled = |mut p: ScaledProduct| {
                p.number *= number;
                (p.number != number || p.absorbs(), p.placed())
            };
            let ((a_takes, a), (b_takes, b)) = (scaled(left), scaled(right));
            (a_takes || b_takes).then(|| Expr::binary(*f, a, b))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use graph::Scalar;

    fn value(e: &Expr, at: &[f64]) -> f64 {
        let inputs: Vec<Scalar> = at.iter().map(|x| Scalar::Float(*x)).collect();
        e.eval(&inputs, &|_| None).unwrap().as_f64()
    }

    /// Operations of the expression, equal ones once.
    fn passes(e: &Expr) -> usize {
        let mut seen = std::collections::BTreeSet::new();
        e.visit(&mut |part| {
            if matches!(part, Expr::Unary(..) | Expr::Binary(..)) {
                seen.insert(part.clone());
            }
        });
        seen.len()
    }

    fn gelu() -> Expr {
        let erf = Expr::unary(Unary::Erf, Expr::In(0).div(Expr::float(2f64.sqrt())));
        let one = Expr::float(1.0);
        Expr::In(0).mul(erf.add(one)).mul(Expr::float(0.5))
    }

    fn check(e: &Expr, n_passes: usize) {
        let made = arranged(e);
        assert_eq!(passes(&made), n_passes, "{made:?}");
        for at in [[0.3, -1.2], [-2.5, 0.7], [4.0, 1.0], [1e-3, 5.0]] {
            let (now, before) = (value(&made, &at), value(e, &at));
            assert!(
                (now - before).abs() <= 1e-14 * before.abs().max(1e-3),
                "{now} {before}"
            );
        }
    }

    #[test]
    fn a_derivative_shares_the_incoming_gradient_and_its_constants() {
        let slope = gelu().pullback(0, &Expr::In(1)).unwrap();
        // x/√2, erf, + 1, · 0.5 of the forward pass, and six of its own.
        check(&slope, 10);
        check(&gelu(), 5);
    }

    #[test]
    fn constants_of_a_product_become_one() {
        let [x, y] = [0, 1].map(Expr::In);
        let e = x
            .clone()
            .mul(Expr::float(3.0))
            .div(Expr::float(7.0))
            .neg()
            .mul(y.clone());
        check(&e, 2);
        // A quotient by a number alone stays one.
        let quotient = x.div(Expr::float(7.0));
        assert_eq!(arranged(&quotient), quotient);
        // Zero is no divisor to take out.
        let e = y.div(Expr::float(0.0)).mul(Expr::float(2.0));
        assert!(value(&arranged(&e), &[0.0, 1.0]).is_infinite());
    }

    #[test]
    fn powers_take_in_what_leaves_them_accurate() {
        let power = |c: f64| {
            let square = Expr::In(0).mul(Expr::In(0));
            Expr::float(c).mul(square.neg().exp()).mul(Expr::In(1))
        };
        // A factor becomes a part of the exponent, whose sign was an operation before.
        check(&power(0.4), 4);
        // Its logarithm in single precision would be too far off, or there is none.
        for c in [1e-9, 3e4, 5.7e36, -0.4] {
            check(&power(c), 5);
        }
    }

    #[test]
    fn sums_keep_what_they_do_not_share() {
        let [x, y] = [0, 1].map(Expr::In);
        let e = Expr::float(0.9).mul(x).add(Expr::float(0.1).mul(y));
        assert_eq!(arranged(&e), e);
        // Taking a number into a sum costs a pass.
        let shifted = Expr::In(0).add(Expr::float(1.0)).mul(Expr::float(2.0));
        check(&shifted, 2);
        // Another rounding may give another step.
        let third = Expr::In(0).mul(Expr::float(1.0 / 3.0));
        let step = Expr::unary(Unary::Floor, third.mul(Expr::float(3.0)));
        assert_eq!(arranged(&step), step);
        let chosen = Expr::select(Expr::In(0).lt(Expr::float(0.0)), Expr::In(0), e);
        assert_eq!(arranged(&chosen), chosen);
    }
}
