//! The straight line from model to executable, recipes, the compile cache.
