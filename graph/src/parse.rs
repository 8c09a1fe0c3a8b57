//! Reading the text form of a graph (see [`crate::text`] for what it looks like).
//!
//! The parser checks form only; whether the graph makes sense is for the verifier.

use crate::dtype::DType;
use crate::graph::{
    Block, Branch, Container, ContainerId, Graph, Index, Lifetime, Loop, Map, Memlet, Node,
    NodeKind, Origin, Output, Param, Reduction, Schedule, Stage, State, Tasklet,
};
use crate::layout::{Layout, Storage};
use crate::lexer::{Token, Word, words};
use crate::scalar::Scalar;
use crate::size::{SymExpr, Symbol};
use crate::tensor::Tensor;
use crate::text::ConstantTable;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The text is not a graph.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: expected {expected}, found {found}")]
pub struct ParseError {
    /// Line, from 1.
    pub line: usize,
    /// Column, from 1, in characters.
    pub column: usize,
    /// What could have stood there.
    pub expected: String,
    /// What stood there.
    pub found: String,
}

/// The graph `text` describes. All its constants stand in the text.
///
/// # Errors
/// The first place where the text is not as [`crate::text`] describes.
pub fn parse(text: &str) -> Result<Graph, ParseError> {
    parse_with(text, &ConstantTable::new())
}

/// Like [`parse`], with the values of large constants, as [`Graph::large_constants`] gives them.
///
/// # Errors
/// As [`parse`], and a constant that is not in the table.
pub fn parse_with(text: &str, constants: &ConstantTable) -> Result<Graph, ParseError> {
    let mut parser = Parser {
        tokens: words(text),
        at: 0,
        constants,
        names: BTreeMap::new(),
        depth: 0,
    };
    let graph = parser.graph()?;
    match parser.peek() {
        Word::End => Ok(graph),
        _ => Err(parser.expected("the end of the text")),
    }
}

/// A place in the words, and the containers seen so far.
pub(crate) struct Parser<'t> {
    tokens: Vec<Token>,
    at: usize,
    constants: &'t ConstantTable,
    names: BTreeMap<String, ContainerId>,
    /// Braces and brackets that are open around this place.
    depth: usize,
}

/// Most braces and brackets in each other: each takes some of the stack.
const MOST_DEPTH: usize = 100;

pub(crate) type Parsed<T> = Result<T, ParseError>;

/// Words: looking at them and taking them.
impl Parser<'_> {
    pub(crate) fn peek(&self) -> &Word {
        &self.tokens[self.at].word
    }

    pub(crate) fn peek_second(&self) -> &Word {
        let last = self.tokens.len() - 1;
        &self.tokens[(self.at + 1).min(last)].word
    }

    pub(crate) fn expected(&self, what: impl Into<String>) -> ParseError {
        self.expected_at(self.at, what)
    }

    fn expected_at(&self, at: usize, what: impl Into<String>) -> ParseError {
        let token = &self.tokens[at];
        ParseError {
            line: token.line,
            column: token.column,
            expected: what.into(),
            found: token.word.to_string(),
        }
    }

    pub(crate) fn advance(&mut self) -> Word {
        let word = self.peek().clone();
        if self.at + 1 < self.tokens.len() {
            self.at += 1;
        }
        word
    }

    /// Reads what stands inside braces or brackets.
    pub(crate) fn inside<T>(&mut self, read: impl FnOnce(&mut Self) -> Parsed<T>) -> Parsed<T> {
        if self.depth == MOST_DEPTH {
            return Err(self.expected(format!("at most {MOST_DEPTH} braces in each other")));
        }
        self.depth += 1;
        let found = read(self);
        self.depth -= 1;
        found
    }

    pub(crate) fn at_sign(&self, sign: &str) -> bool {
        matches!(self.peek(), Word::Sign(s) if *s == sign)
    }

    pub(crate) fn take_sign(&mut self, sign: &str) -> bool {
        let found = self.at_sign(sign);
        if found {
            self.advance();
        }
        found
    }

    pub(crate) fn sign(&mut self, sign: &str) -> Parsed<()> {
        match self.take_sign(sign) {
            true => Ok(()),
            false => Err(self.expected(format!("`{sign}`"))),
        }
    }

    pub(crate) fn at_word(&self, word: &str) -> bool {
        matches!(self.peek(), Word::Name(n) if n == word)
    }

    fn take_word(&mut self, word: &str) -> bool {
        let found = self.at_word(word);
        if found {
            self.advance();
        }
        found
    }

    fn word(&mut self, word: &str) -> Parsed<()> {
        match self.take_word(word) {
            true => Ok(()),
            false => Err(self.expected(format!("`{word}`"))),
        }
    }

    fn text(&mut self) -> Parsed<String> {
        match self.peek().clone() {
            Word::Text(text) => {
                self.advance();
                Ok(text)
            }
            _ => Err(self.expected("a text in quotes")),
        }
    }

    /// A name, in quotes or not.
    pub(crate) fn name(&mut self, what: &str) -> Parsed<String> {
        match self.peek().clone() {
            Word::Name(name) | Word::Text(name) => {
                self.advance();
                Ok(name)
            }
            _ => Err(self.expected(what)),
        }
    }

    pub(crate) fn symbol(&mut self) -> Parsed<Symbol> {
        match self.peek().clone() {
            Word::Name(name) => {
                self.advance();
                Ok(Symbol::new(name))
            }
            _ => Err(self.expected("the name of a size or index")),
        }
    }

    /// Items separated by commas up to `close`, which is taken.
    pub(crate) fn list<T>(
        &mut self,
        close: &str,
        mut item: impl FnMut(&mut Self) -> Parsed<T>,
    ) -> Parsed<Vec<T>> {
        let mut items = Vec::new();
        if self.take_sign(close) {
            return Ok(items);
        }
        loop {
            items.push(item(self)?);
            if self.take_sign(close) {
                return Ok(items);
            }
            if !self.take_sign(",") {
                return Err(self.expected(format!("`,` or `{close}`")));
            }
        }
    }

    /// Parses at least one item; items are separated by commas.
    fn sequence<T>(&mut self, mut item: impl FnMut(&mut Self) -> Parsed<T>) -> Parsed<Vec<T>> {
        let mut items = vec![item(self)?];
        while self.take_sign(",") {
            items.push(item(self)?);
        }
        Ok(items)
    }

    pub(crate) fn dtype(&mut self) -> Parsed<DType> {
        let found = match self.peek() {
            Word::Name(name) => DType::parse(name),
            _ => None,
        };
        match found {
            Some(dtype) => {
                self.advance();
                Ok(dtype)
            }
            None => Err(self.expected("an element type such as `f32`")),
        }
    }
}

/// The graph.
impl Parser<'_> {
    fn graph(&mut self) -> Parsed<Graph> {
        self.word("graph")?;
        let mut graph = Graph {
            name: self.text()?,
            ..Graph::default()
        };
        self.sign("{")?;
        if self.take_word("symbols") {
            graph.symbols = self.sequence(Self::symbol)?;
        }
        while self.at_sign("%") {
            let start = self.at;
            let container = self.container()?;
            let id = ContainerId(graph.containers.len() as u32);
            if self.names.insert(container.name.clone(), id).is_some() {
                return Err(self.expected_at(start + 1, "a name no other container has"));
            }
            graph.containers.push(container);
        }
        if self.take_word("inputs") {
            graph.inputs = self.sequence(Self::id)?;
        }
        graph.body = self.blocks()?;
        if self.take_word("outputs") {
            graph.outputs = self.sequence(Self::output)?;
        }
        match self.take_sign("}") {
            true => Ok(graph),
            false => Err(self.expected("`state`, `loop`, `branch`, `outputs` or `}`")),
        }
    }

    fn output(&mut self) -> Parsed<Output> {
        let container = self.id()?;
        let updates = match self.take_sign("->") {
            true => Some(self.id()?),
            false => None,
        };
        Ok(Output { container, updates })
    }

    fn container(&mut self) -> Parsed<Container> {
        self.sign("%")?;
        let name = self.name("the name of a container")?;
        self.sign(":")?;
        let dtype = self.dtype()?;
        self.sign("[")?;
        let shape = self.list("]", Self::size)?;
        let mut layout = Layout::row_major(shape.len());
        if self.at_sign("<") {
            let start = self.at;
            self.advance();
            let order = self.list(">", Self::position)?;
            layout = Layout::from_order(order)
                .ok_or_else(|| self.expected_at(start, "a permutation of the dimensions"))?;
        }
        let storage = match self.take_word("local") {
            true => Storage::Local,
            false => Storage::Global,
        };
        let lifetime = self.lifetime(dtype, &shape)?;
        Ok(Container {
            name,
            dtype,
            shape,
            layout,
            storage,
            lifetime,
        })
    }

    fn lifetime(&mut self, dtype: DType, shape: &[SymExpr]) -> Parsed<Lifetime> {
        if self.take_word("input") {
            return Ok(Lifetime::Input);
        }
        if self.take_word("parameter") {
            return Ok(Lifetime::Parameter);
        }
        if !self.take_word("constant") {
            return Ok(Lifetime::Transient);
        }
        let start = self.at;
        let (mut dtype, mut shape) = (dtype, shape.to_vec());
        if matches!(self.peek(), Word::Name(n) if DType::parse(n).is_some()) {
            dtype = self.dtype()?;
            self.sign("[")?;
            shape = self.list("]", Self::size)?;
        }
        let sizes: Option<Vec<usize>> = shape
            .iter()
            .map(|s| s.as_const().and_then(|n| usize::try_from(n).ok()))
            .collect();
        let sizes =
            sizes.ok_or_else(|| self.expected_at(start, "the constant's own type and shape"))?;
        let value = self.constant(dtype, &sizes)?;
        Ok(Lifetime::Constant(value))
    }

    fn constant(&mut self, dtype: DType, shape: &[usize]) -> Parsed<Arc<Tensor>> {
        let start = self.at;
        if let Word::Hash(hash) = self.peek().clone() {
            self.advance();
            let known = self.constants.get(&hash).cloned();
            return known.ok_or_else(|| self.expected_at(start, "a constant of the given table"));
        }
        if self.take_word("all") {
            let value = self.scalar()?;
            return Ok(Arc::new(Tensor::filled(dtype, shape, value)));
        }
        self.sign("[")?;
        let elements = self.list("]", Self::scalar)?;
        let mut tensor = Tensor::zeros(dtype, shape);
        if tensor.len() != elements.len() {
            let what = format!("{} elements", tensor.len());
            return Err(self.expected_at(start, what));
        }
        for (i, element) in elements.into_iter().enumerate() {
            tensor.set(i, element);
        }
        Ok(Arc::new(tensor))
    }

    pub(crate) fn position(&mut self) -> Parsed<usize> {
        match *self.peek() {
            Word::Int(n) => {
                self.advance();
                Ok(n as usize)
            }
            _ => Err(self.expected("a position (0, 1, …)")),
        }
    }

    pub(crate) fn id(&mut self) -> Parsed<ContainerId> {
        self.sign("%")?;
        let start = self.at;
        let name = self.name("the name of a container")?;
        let known = self.names.get(&name).copied();
        known.ok_or_else(|| self.expected_at(start, "the name of a container declared above"))
    }

    fn blocks(&mut self) -> Parsed<Vec<Block>> {
        let mut blocks = Vec::new();
        loop {
            if self.take_word("state") {
                let nodes = self.body()?;
                blocks.push(Block::State(State { nodes }));
            } else if self.take_word("loop") {
                let symbol = self.symbol()?;
                self.sign("<")?;
                let count = self.size()?;
                let body = self.block_body()?;
                blocks.push(Block::Loop(Loop {
                    symbol,
                    count,
                    body,
                }));
            } else if self.take_word("branch") {
                let condition = self.id()?;
                let then = self.block_body()?;
                self.word("else")?;
                let otherwise = self.block_body()?;
                blocks.push(Block::Branch(Branch {
                    condition,
                    then,
                    otherwise,
                }));
            } else {
                return Ok(blocks);
            }
        }
    }

    fn block_body(&mut self) -> Parsed<Vec<Block>> {
        self.sign("{")?;
        let blocks = self.inside(Self::blocks)?;
        match self.take_sign("}") {
            true => Ok(blocks),
            false => Err(self.expected("`state`, `loop`, `branch` or `}`")),
        }
    }

    /// Nodes in braces.
    fn body(&mut self) -> Parsed<Vec<Node>> {
        self.sign("{")?;
        let mut nodes = Vec::new();
        while !self.take_sign("}") {
            nodes.push(self.inside(Self::node)?);
        }
        Ok(nodes)
    }

    fn node(&mut self) -> Parsed<Node> {
        if self.take_word("map") {
            return self.map();
        }
        let kind = if self.take_word("tasklet") {
            NodeKind::Tasklet(self.tasklet()?)
        } else if ["%", "-", "="].into_iter().any(|s| self.at_sign(s)) {
            NodeKind::Library(self.library()?)
        } else {
            return Err(self.expected("`map`, `tasklet`, an operator or `}`"));
        };
        let (origin, stage) = self.annotation()?;
        Ok(Node {
            kind,
            origin,
            stage,
        })
    }

    fn map(&mut self) -> Parsed<Node> {
        self.sign("[")?;
        let params = self.list("]", |p| {
            let name = p.symbol()?;
            p.sign("<")?;
            let size = p.size()?;
            Ok(Param { name, size })
        })?;
        let schedule = if self.take_word("kernel") {
            Schedule::Kernel
        } else if self.take_word("sequential") {
            Schedule::Sequential
        } else {
            Schedule::Default
        };
        let (origin, stage) = self.annotation()?;
        let body = self.body()?;
        let map = Map {
            params,
            body,
            schedule,
        };
        Ok(Node {
            kind: NodeKind::Map(map),
            origin,
            stage,
        })
    }

    fn annotation(&mut self) -> Parsed<(Arc<Origin>, Stage)> {
        let mut origin = Origin::default();
        if self.take_sign("@") {
            origin.node = self.text()?;
            if self.take_word("in") {
                origin.module = self.text()?;
            }
            if self.take_word("at") {
                origin.source = self.text()?;
            }
        }
        let mut stage = Stage::Forward;
        if self.take_sign("!") {
            stage = if self.take_word("backward") {
                Stage::Backward
            } else if self.take_word("optimizer") {
                Stage::Optimizer
            } else {
                return Err(self.expected("`backward` or `optimizer`"));
            };
        }
        Ok((Arc::new(origin), stage))
    }

    fn tasklet(&mut self) -> Parsed<Tasklet> {
        let mut outputs = Vec::new();
        if self.at_sign("%") {
            outputs = self.sequence(|p| {
                let memlet = p.memlet()?;
                p.sign("=")?;
                Ok((memlet, p.expression()?))
            })?;
        }
        let mut inputs = Vec::new();
        if self.take_word("from") {
            inputs = self.sequence(Self::memlet)?;
        }
        Ok(Tasklet { inputs, outputs })
    }

    fn memlet(&mut self) -> Parsed<Memlet> {
        let container = self.id()?;
        self.sign("[")?;
        let mut subset = Vec::new();
        while !self.at_sign("]") && !self.at_sign("|") {
            subset.push(match self.take_sign("$") {
                true => Index::Data(self.position()?),
                false => Index::At(self.size()?),
            });
            if !self.take_sign(",") && !self.at_sign("]") && !self.at_sign("|") {
                return Err(self.expected("`,`, `|` or `]`"));
            }
        }
        let fill = match self.take_sign("|") {
            true => Some(self.scalar()?),
            false => None,
        };
        self.sign("]")?;
        let conflict = match self.take_sign("(") {
            true => Some(self.reduction()?),
            false => None,
        };
        Ok(Memlet {
            container,
            subset,
            fill,
            conflict,
        })
    }

    fn reduction(&mut self) -> Parsed<Reduction> {
        let named = |r: &Reduction| self.at_word(r.name());
        let found = Reduction::ALL.into_iter().find(named);
        let reduction = found.ok_or_else(|| self.expected("`sum`, `prod`, `max` or `min`"))?;
        self.advance();
        self.sign(")")?;
        Ok(reduction)
    }

    /// A number or truth value with its sign.
    pub(crate) fn scalar(&mut self) -> Parsed<Scalar> {
        let start = self.at;
        let negative = self.take_sign("-");
        let value = match self.peek().clone() {
            Word::Int(n) => {
                let value = if negative {
                    -i128::from(n)
                } else {
                    i128::from(n)
                };
                i64::try_from(value).ok().map(Scalar::Int)
            }
            Word::Float(x) => Some(Scalar::Float(if negative { -x } else { x })),
            Word::Name(n) => match n.as_str() {
                "inf" if negative => Some(Scalar::Float(f64::NEG_INFINITY)),
                "inf" => Some(Scalar::Float(f64::INFINITY)),
                "true" if !negative => Some(Scalar::Bool(true)),
                "false" if !negative => Some(Scalar::Bool(false)),
                "nan" if !negative => return self.nan(),
                _ => None,
            },
            _ => None,
        };
        let value = value.ok_or_else(|| self.expected_at(start, "a number, `true` or `false`"))?;
        self.advance();
        Ok(value)
    }

    /// `nan` or `nan(bits)`.
    fn nan(&mut self) -> Parsed<Scalar> {
        self.word("nan")?;
        if !self.take_sign("(") {
            return Ok(Scalar::Float(f64::NAN));
        }
        match *self.peek() {
            Word::Int(bits) if f64::from_bits(bits).is_nan() => {
                self.advance();
                self.sign(")")?;
                Ok(Scalar::Float(f64::from_bits(bits)))
            }
            _ => Err(self.expected("the bits of a NaN")),
        }
    }
}
