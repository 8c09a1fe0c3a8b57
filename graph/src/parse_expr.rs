//! Reading sizes, tasklet expressions, operators and their attributes.

use crate::dtype::DType;
use crate::expr::Expr;
use crate::function::{Binary, Unary};
use crate::graph::{Attr, ContainerId, Library};
use crate::lexer::Word;
use crate::parse::{ParseError, Parsed, Parser};
use crate::scalar::Scalar;
use crate::size::SymExpr;
use crate::text::infix;

/// Most operands of signs in a row: they become an expression of that depth.
const MOST_SIGNS: usize = 1000;

impl Parser<'_> {
    /// `2*oh + r - 1`.
    pub(crate) fn size(&mut self) -> Parsed<SymExpr> {
        let mut sum = self.size_product()?;
        loop {
            if self.take_sign("+") {
                sum = sum + self.size_product()?;
            } else if self.take_sign("-") {
                sum = sum - self.size_product()?;
            } else {
                return Ok(sum);
            }
        }
    }

    fn size_product(&mut self) -> Parsed<SymExpr> {
        let mut product = self.size_factor()?;
        while self.take_sign("*") {
            product = product * self.size_factor()?;
        }
        Ok(product)
    }

    fn size_factor(&mut self) -> Parsed<SymExpr> {
        if self.take_sign("-") {
            return Ok(-self.inside(Self::size_product)?);
        }
        if self.take_sign("(") {
            let size = self.inside(Self::size)?;
            self.sign(")")?;
            return Ok(size);
        }
        match self.peek().clone() {
            Word::Int(n) => {
                let n = i64::try_from(n).map_err(|_| self.expected("a size below 2^63"))?;
                self.advance();
                Ok(SymExpr::constant(n))
            }
            Word::Name(name) if matches!(self.peek_second(), Word::Sign("(")) => {
                self.size_function(&name)
            }
            Word::Name(_) => Ok(SymExpr::symbol(self.symbol()?)),
            _ => Err(self.expected("a size")),
        }
    }

    fn size_function(&mut self, name: &str) -> Parsed<SymExpr> {
        let function = match name {
            "floordiv" => SymExpr::floor_div,
            "mod" => SymExpr::modulo,
            "min" => SymExpr::min_with,
            "max" => SymExpr::max_with,
            _ => return Err(self.expected("`floordiv`, `mod`, `min` or `max`")),
        };
        self.advance();
        self.sign("(")?;
        let a = self.inside(Self::size)?;
        self.sign(",")?;
        let b = self.inside(Self::size)?;
        self.sign(")")?;
        Ok(function(&a, &b))
    }

    /// `$0 * tanh({i} + 1.5)`.
    pub(crate) fn expression(&mut self) -> Parsed<Expr> {
        self.level(1)
    }

    /// An expression of signs that bind at least as tightly as `level`.
    fn level(&mut self, level: u8) -> Parsed<Expr> {
        if level > 3 {
            return self.operand();
        }
        let mut left = self.level(level + 1)?;
        let mut n_signs = 0;
        while let Some(f) = self.infix_sign(level) {
            n_signs += 1;
            if n_signs > MOST_SIGNS {
                return Err(self.expected(format!("at most {MOST_SIGNS} signs in a row")));
            }
            self.advance();
            left = Expr::binary(f, left, self.level(level + 1)?);
        }
        Ok(left)
    }

    fn infix_sign(&self, level: u8) -> Option<Binary> {
        Binary::ALL
            .into_iter()
            .find(|f| infix(*f).is_some_and(|(sign, l)| l == level && self.at_sign(sign)))
    }

    fn operand(&mut self) -> Parsed<Expr> {
        if self.take_sign("$") {
            return Ok(Expr::In(self.position()?));
        }
        if self.take_sign("{") {
            let size = self.size()?;
            self.sign("}")?;
            return Ok(Expr::Index(size));
        }
        if self.take_sign("(") {
            let inner = self.inside(Self::expression)?;
            self.sign(")")?;
            return Ok(inner);
        }
        match self.peek().clone() {
            Word::Name(name) if !["inf", "nan", "true", "false"].contains(&name.as_str()) => {
                self.call(&name)
            }
            Word::Int(_) | Word::Float(_) | Word::Name(_) => Ok(Expr::Const(self.scalar()?)),
            Word::Sign("-") => Ok(Expr::Const(self.scalar()?)),
            _ => Err(self.expected("an expression")),
        }
    }

    fn call(&mut self, name: &str) -> Parsed<Expr> {
        let unknown = self.expected("the name of a function");
        self.advance();
        if !self.take_sign("(") {
            return Err(self.expected("`(`"));
        }
        let start = self.expected("operands");
        let operands = self.inside(|p| p.list(")", Self::expression))?;
        let wrong_number = |n: usize| ParseError {
            expected: format!("{n} operands of `{name}`"),
            found: operands.len().to_string(),
            ..start.clone()
        };
        let unary = Unary::ALL.into_iter().find(|f| f.name() == name);
        let binary = Binary::ALL.into_iter().find(|f| f.name() == name);
        let mut it = operands.iter().cloned();
        let (a, b, c) = (it.next(), it.next(), it.next());
        let count = operands.len();
        if let Some(d) = DType::parse(name) {
            return one(a, count).map_or_else(|| Err(wrong_number(1)), |a| Ok(a.cast(d)));
        }
        match (unary, binary, name, a, b, c) {
            (Some(f), _, _, Some(a), None, _) => Ok(Expr::unary(f, a)),
            (_, Some(f), _, Some(a), Some(b), None) => Ok(Expr::binary(f, a, b)),
            (_, _, "uniform", Some(a), Some(b), None) => Ok(Expr::Uniform(a.into(), b.into())),
            (_, _, "select", Some(a), Some(b), Some(c)) if count == 3 => Ok(Expr::select(a, b, c)),
            (Some(_), ..) => Err(wrong_number(1)),
            (_, Some(_), ..) | (_, _, "uniform", ..) => Err(wrong_number(2)),
            (_, _, "select", ..) => Err(wrong_number(3)),
            _ => Err(unknown),
        }
    }

    /// `%y, - = op(%x, -) {key=value}`.
    pub(crate) fn library(&mut self) -> Parsed<Library> {
        let outputs = self.list("=", Self::optional)?;
        let op = self.name("the name of an operator")?;
        self.sign("(")?;
        let inputs = self.list(")", Self::optional)?;
        let mut library = Library {
            op,
            attrs: Default::default(),
            inputs,
            outputs,
        };
        if self.take_sign("{") {
            let attrs = self.list("}", |p| {
                let key = p.name("the name of an attribute")?;
                p.sign("=")?;
                Ok((key, p.attr()?))
            })?;
            library.attrs = attrs.into_iter().collect();
        }
        Ok(library)
    }

    fn optional(&mut self) -> Parsed<Option<ContainerId>> {
        match self.take_sign("-") {
            true => Ok(None),
            false => self.id().map(Some),
        }
    }

    fn attr(&mut self) -> Parsed<Attr> {
        match self.peek().clone() {
            Word::Text(text) => {
                self.advance();
                Ok(Attr::Str(text))
            }
            Word::Sign("[") => {
                self.advance();
                Ok(Attr::Ints(self.list("]", Self::integer)?))
            }
            Word::Sign("(") => {
                self.advance();
                let e = self.expression()?;
                self.sign(")")?;
                Ok(Attr::Expr(e))
            }
            Word::Name(name) if name == "sizes" || name == "floats" => {
                self.advance();
                self.sign("[")?;
                Ok(match name.as_str() {
                    "sizes" => Attr::Sizes(self.list("]", Self::size)?),
                    _ => Attr::Floats(self.list("]", Self::real)?),
                })
            }
            Word::Name(name) if DType::parse(&name).is_some() => Ok(Attr::DType(self.dtype()?)),
            _ => match self.scalar() {
                Ok(Scalar::Int(i)) => Ok(Attr::Int(i)),
                Ok(Scalar::Float(x)) => Ok(Attr::Float(x)),
                Ok(Scalar::Bool(b)) => Ok(Attr::Bool(b)),
                Err(e) => Err(ParseError {
                    expected: "the value of an attribute".into(),
                    ..e
                }),
            },
        }
    }

    fn integer(&mut self) -> Parsed<i64> {
        let error = self.expected("an integer");
        match self.scalar() {
            Ok(Scalar::Int(i)) => Ok(i),
            _ => Err(error),
        }
    }

    fn real(&mut self) -> Parsed<f64> {
        let error = self.expected("a real number such as `1.0`");
        match self.scalar() {
            Ok(Scalar::Float(x)) => Ok(x),
            _ => Err(error),
        }
    }
}

fn one(first: Option<Expr>, count: usize) -> Option<Expr> {
    first.filter(|_| count == 1)
}
