//! Checks that sibling modules import each other in one direction only: no package has an import
//! circle at any level.

use std::collections::{BTreeMap, BTreeSet};

use super::{PACKAGES, product_code, sources, tokens};

/// A module: its path from the crate root.
type Module = Vec<String>;

/// The known circles: package, parent, and the modules on the circle. No other circle is allowed.
const KNOWN: [(&str, &str, &[&str]); 2] = [
    (
        "core",
        "engine",
        // Five small types of these modules belong in a lower layer: `Parting`, `Meeting`,
        // `MatchLimits`, `Form`, `Notice`.
        &[
            "close", "epoch", "failover", "joint", "pending", "post", "protocol", "submit",
            "table", "wait",
        ],
    ),
    // The objects of the fake provider refer to each other, as in a real provider.
    ("tests/testing", "fabric", &["info", "object", "post", "queue", "world"]),
];

fn modules(package: &str) -> BTreeMap<Module, String> {
    let path = |source: &super::Source| -> Module {
        let parts = source.path.with_extension("");
        let parts = parts.components().map(|part| part.as_os_str().to_str().unwrap().to_owned());
        parts.filter(|part| part != "lib" && part != "main").collect()
    };
    sources(package).into_iter().map(|source| (path(&source), source.code)).collect()
}

/// Returns the paths that start with `crate`, `super` or `self`. Splits a use tree into its
/// branches.
fn paths(code: &str) -> Vec<Vec<&str>> {
    let tokens = tokens(code);
    let (mut found, mut at) = (vec![], 0);
    while at < tokens.len() {
        let begins =
            matches!(tokens[at], "crate" | "super" | "self") && tokens.get(at + 1) == Some(&"::");
        at = match begins && (at == 0 || tokens[at - 1] != "::") {
            true => branch(&tokens, at, &[], &mut found),
            false => at + 1,
        };
    }
    found
}

/// Reads a path or a use tree after `prefix`. Returns the position of the first token after the
/// tree.
fn branch<'a>(
    tokens: &[&'a str],
    mut at: usize,
    prefix: &[&'a str],
    found: &mut Vec<Vec<&'a str>>,
) -> usize {
    let mut path = prefix.to_vec();
    while at < tokens.len() {
        if tokens[at] == "{" {
            at += 1;
            while at < tokens.len() && tokens[at] != "}" {
                at = branch(tokens, at, &path, found);
                // Skips an alias and the separator of the branch.
                while at < tokens.len() && tokens[at] != "," && tokens[at] != "}" {
                    at += 1;
                }
                at += usize::from(tokens.get(at) == Some(&","));
            }
            return at + 1;
        }
        path.push(tokens[at]);
        at += 1;
        if tokens.get(at) != Some(&"::") {
            break;
        }
        at += 1;
    }
    found.push(path);
    at
}

/// Resolves a path in module `from` to a module.
fn target(modules: &BTreeMap<Module, String>, from: &Module, path: &[&str]) -> Module {
    let ups = path.iter().take_while(|part| **part == "super").count();
    let (mut at, rest) = match path[0] {
        "crate" => (vec![], &path[1..]),
        "self" => (from.clone(), &path[1..]),
        _ => (from[..from.len().saturating_sub(ups)].to_vec(), &path[ups..]),
    };
    for part in rest {
        at.push((*part).to_owned());
        if !modules.contains_key(&at) {
            at.pop();
            break;
        }
    }
    at
}

/// Returns the child modules of `parent` that are on an import circle, or between two circles.
fn circle(modules: &BTreeMap<Module, String>, parent: &[String]) -> BTreeSet<String> {
    let below = |module: &Module| {
        (module.len() > parent.len() && module.starts_with(parent))
            .then(|| module[parent.len()].clone())
    };
    let mut imports = BTreeSet::new();
    for (module, code) in modules {
        let Some(from) = below(module) else { continue };
        for path in paths(code) {
            let to = below(&target(modules, module, &path));
            imports.extend(to.filter(|to| *to != from).map(|to| (from.clone(), to)));
        }
    }
    // Repeatedly removes modules without imports or importers, because they are on no circle.
    loop {
        let left: BTreeSet<_> = imports.iter().map(|(from, _)| from.clone()).collect();
        let right: BTreeSet<_> = imports.iter().map(|(_, to)| to.clone()).collect();
        let on: BTreeSet<_> = left.intersection(&right).cloned().collect();
        let before = imports.len();
        imports.retain(|(from, to)| on.contains(from) && on.contains(to));
        if imports.len() == before {
            return on;
        }
    }
}

fn circles(
    package: &str,
    modules: &BTreeMap<Module, String>,
) -> Vec<(String, String, Vec<String>)> {
    let parents: BTreeSet<&[String]> =
        modules.keys().flat_map(|module| (0..module.len()).map(|len| &module[..len])).collect();
    let found = parents.into_iter().map(|parent| (parent, circle(modules, parent)));
    let found = found.filter(|(_, circle)| !circle.is_empty());
    found
        .map(|(parent, circle)| {
            (package.to_owned(), parent.join("/"), circle.into_iter().collect())
        })
        .collect()
}

#[test]
fn modules_import_in_no_circle() {
    let found: Vec<_> =
        PACKAGES.iter().flat_map(|(package, _)| circles(package, &modules(package))).collect();
    let owned = |of: &[&str]| of.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let known: Vec<_> = KNOWN
        .iter()
        .map(|(package, parent, circle)| {
            ((*package).to_owned(), (*parent).to_owned(), owned(circle))
        })
        .collect();
    assert_eq!(found, known, "move what both sides name into a module of its own, below them");
}

#[test]
fn a_planted_circle_is_found() {
    let of = |files: &[(&str, &str)]| {
        let module = |path: &str| -> Module {
            path.split('/').filter(|part| !part.is_empty()).map(str::to_owned).collect()
        };
        let modules: BTreeMap<_, _> =
            files.iter().map(|(path, code)| (module(path), product_code(code).0)).collect();
        circles("p", &modules)
            .into_iter()
            .map(|(_, parent, on)| (parent, on.join(" ")))
            .collect::<Vec<_>>()
    };
    let found = |parent: &str, on: &str| vec![(parent.to_owned(), on.to_owned())];
    let root = ("", "mod a;\nmod b;\nmod c;\n");
    assert_eq!(
        of(&[
            root,
            ("a", "use crate::b::B;\n"),
            ("b", "use super::{a::{A, X as Y}, c};\n"),
            ("c", "")
        ]),
        found("", "a b")
    );
    assert_eq!(
        of(&[root, ("a", "use crate::b::B;\n"), ("b", "use super::c::C;\n"), ("c", "fn f() {}\n")]),
        []
    );
    // A circle through nested modules.
    assert_eq!(
        of(&[root, ("a", ""), ("a/x", "use crate::b;\n"), ("b", "use crate::a::x::X;\n")]),
        found("", "a b")
    );
    assert_eq!(
        of(&[
            root,
            ("a", ""),
            ("a/x", "use super::y::Y;\n"),
            ("a/y", "fn f() -> super::x::X {}\n")
        ]),
        found("a", "x y")
    );
    // A parent and its children may name each other. Test code may name any module.
    assert_eq!(of(&[root, ("a", "use self::x::X;\n"), ("a/x", "use super::A;\n")]), []);
    let tested = "#[cfg(test)]\nmod tests {\n    use crate::a;\n}\n";
    assert_eq!(of(&[root, ("a", "use crate::b;\n"), ("b", tested)]), []);
}
