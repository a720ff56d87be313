//! meshwork
