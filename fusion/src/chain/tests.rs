//! Each condition of chaining: a case in which it alone refuses, beside one that is accepted.
