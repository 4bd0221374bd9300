//! What only a fake can do to a rail.
