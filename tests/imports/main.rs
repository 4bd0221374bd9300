//! Checks the tree's import rules in its source files.
//!
//! | rule | read from |
//! |---|---|
//! | core is `no_std`: no `std`, no `libc`; `alloc` in one file, by its feature | core/src |
//! | `sync <- rail <- engine <- queue <- context, psm` within core | core/src |
//! | `core <- sys`, `core <- shm <- gpu`, all `<- fishplate` | the Cargo.tomls |
//! | `fishplate <- tool, bindings, adapters` | the Cargo.tomls |
//! | `sys <- tests/testing`; sys and shm never see each other | the Cargo.tomls |
//! | nothing depends on benches or tests | the Cargo.tomls |
//! | core, sys, shm, gpu start no thread, read no environment, set no signal handler | their src |
//! | each ordering is relaxed, or names an edge without which a model fails | most packages' src |
//! | sibling modules import each other in one direction | all packages' src |
//! | lines end at column 100, except addresses, tables and quoted text | all files |
//!
//! Comments may name anything, and so may code that is compiled only for tests or models.

mod circles;

use std::fs;
use std::path::{Path, PathBuf};

/// A source file without comments and test-only items.
struct Source {
    path: PathBuf,
    code: String,
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn sources(package: &str) -> Vec<Source> {
    let top = root().join(package).join("src");
    let mut sources = vec![];
    let mut folders = vec![top.clone()];
    let mut test_modules = vec![];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                let modules = path.with_extension("");
                let modules = if modules.ends_with("lib") { top.clone() } else { modules };
                let (code, skipped) = product_code(&text);
                test_modules.extend(skipped.iter().map(|module| modules.join(module)));
                let path = path.strip_prefix(&top).unwrap().to_owned();
                sources.push(Source { path, code });
            }
        }
    }
    assert!(!sources.is_empty(), "no sources under {}", top.display());
    sources.retain(|source| {
        !test_modules
            .iter()
            .any(|module| top.join(&source.path).with_extension("").starts_with(module))
    });
    sources
}

/// Returns the code of a file without comments and without items under `#[cfg(test)]`,
/// `cfg(all(test, ..))` or `#[cfg(fishplate_loom)]`. Also returns the names of removed modules with
/// their own files. Expects code formatted by rustfmt.
fn product_code(text: &str) -> (String, Vec<String>) {
    let mut code = String::new();
    let mut modules = vec![];
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let code_line = line.split("//").next().unwrap();
        let indent = &line[..line.len() - line.trim_start().len()];
        let attribute = line.trim_start();
        let tested = ["#[cfg(test", "#[cfg(all(test", "#[cfg(fishplate_loom"];
        if !tested.iter().any(|tested| attribute.starts_with(tested)) {
            code.push_str(code_line);
            code.push('\n');
            continue;
        }
        // The removed item ends with a semicolon, or with a brace in the column of its attribute.
        for line in lines.by_ref() {
            let item = line.trim_start();
            if let Some(module) = item.split("mod ").nth(1).and_then(|rest| rest.strip_suffix(';'))
            {
                modules.push(module.to_owned());
            }
            if item.ends_with(';')
                && line.starts_with(indent)
                && !line[indent.len()..].starts_with(' ')
                || line.trim_end() == format!("{indent}}}")
            {
                break;
            }
        }
    }
    (code, modules)
}

/// Splits code into identifiers and path punctuation.
fn tokens(code: &str) -> Vec<&str> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut tokens = vec![];
    let mut rest = code;
    while let Some(first) = rest.chars().next() {
        let len = match first {
            c if is_word(c) => rest.find(|c| !is_word(c)).unwrap_or(rest.len()),
            _ if rest.starts_with("::") => 2,
            c => c.len_utf8(),
        };
        if !first.is_whitespace() {
            tokens.push(&rest[..len]);
        }
        rest = &rest[len..];
    }
    tokens
}

/// Returns the names that follow at least `times` repetitions of `prefix::`. Includes the branches
/// of a use tree.
fn named_behind<'a>(prefix: &str, times: usize, tokens: &[&'a str]) -> Vec<&'a str> {
    let mut named = vec![];
    for at in 0..tokens.len().saturating_sub(2) {
        let chain =
            tokens[..at + 2].rchunks_exact(2).take_while(|pair| *pair == [prefix, "::"]).count();
        if chain == 0 || chain < times {
            continue;
        }
        if tokens[at + 2] != "{" {
            named.push(tokens[at + 2]);
            continue;
        }
        let mut depth = 0;
        for (&before, &token) in tokens[at + 2..].iter().zip(&tokens[at + 3..]) {
            depth += i32::from(before == "{") - i32::from(before == "}");
            if depth == 0 {
                break;
            }
            if depth == 1 && (before == "{" || before == ",") {
                named.push(token);
            }
        }
    }
    named
}

/// Returns the modules of core that `module` must not name.
fn above(module: &str) -> &'static [&'static str] {
    match module {
        "bytes" => &["sync", "rail", "engine", "queue", "context", "psm", "op", "mem", "error"],
        "sync" => &["rail", "engine", "queue", "context", "psm", "op", "mem", "error"],
        "op" | "mem" | "error" => &["rail", "engine", "queue", "context", "psm"],
        "rail" => &["engine", "queue", "context", "psm"],
        "engine" => &["queue", "context", "psm"],
        "queue" => &["context", "psm"],
        "context" => &["psm"],
        _ => &[],
    }
}

fn layer_breaches(path: &Path, code: &str) -> Vec<String> {
    let module =
        path.components().next().unwrap().as_os_str().to_str().unwrap().trim_end_matches(".rs");
    let tokens = tokens(code);
    // From a file at a path of N components, N `super`s lead to the crate root.
    let depth = path.components().count();
    let named =
        named_behind("crate", 1, &tokens).into_iter().chain(named_behind("super", depth, &tokens));
    named
        .filter(|name| above(module).contains(name))
        .map(|name| format!("{} names {name}", path.display()))
        .collect()
}

/// Returns the packages that a Cargo.toml depends on, without dev-dependencies.
fn dependencies(manifest: &str) -> Vec<String> {
    let mut found = vec![];
    let mut in_dependencies = false;
    for line in manifest.lines().map(str::trim) {
        if let Some(section) = line.strip_prefix('[') {
            let section = section.trim_end_matches(']');
            let (_, last) = section.rsplit_once('.').unwrap_or(("", section));
            in_dependencies = matches!(last, "dependencies" | "build-dependencies");
            if let Some((_, package)) =
                section.split_once("dependencies.").filter(|_| !section.contains("dev-"))
            {
                found.push(package.to_owned());
            }
        } else if in_dependencies && !line.starts_with('#') {
            let name = line.split(['=', '.', ' ']).next().unwrap();
            found.extend((!name.is_empty()).then(|| name.to_owned()));
        }
    }
    found
}

fn manifest(package: &str) -> String {
    fs::read_to_string(root().join(package).join("Cargo.toml")).unwrap()
}

#[test]
fn core_names_no_std_and_no_system() {
    for source in sources("core") {
        let tokens = tokens(&source.code);
        // This file is compiled only with the feature `alloc`.
        let allocates = source.path == Path::new("sync/pool/heap.rs");
        for word in
            ["std", "alloc", "libc"].into_iter().filter(|word| !(allocates && *word == "alloc"))
        {
            let named =
                tokens.windows(2).any(|pair| pair == [word, "::"] || pair == ["crate", word]);
            assert!(!named, "core/src/{} names {word}", source.path.display());
        }
    }
    let pool = fs::read_to_string(root().join("core/src/sync/pool.rs")).unwrap();
    assert!(
        pool.contains("#[cfg(feature = \"alloc\")]\nmod heap;\n"),
        "the heap form is not behind its feature"
    );
    let lib = fs::read_to_string(root().join("core/src/lib.rs")).unwrap();
    assert!(lib.lines().any(|line| line == "#![no_std]"), "core is not no_std");
    for package in dependencies(&manifest("core")) {
        let allowed = ["crossbeam-utils", "static_assertions", "memoffset", "loom"];
        assert!(allowed.contains(&package.as_str()), "core depends on {package}");
    }
}

#[test]
fn layers_of_core_name_only_lower_layers() {
    let breaches: Vec<_> = sources("core")
        .iter()
        .flat_map(|source| layer_breaches(&source.path, &source.code))
        .collect();
    assert!(breaches.is_empty(), "{breaches:#?}");
}

/// The checked packages, each with the packages of this tree that it may depend on.
/// Dev-dependencies are not checked.
const PACKAGES: [(&str, &[&str]); 12] = [
    ("core", &[]),
    ("sys", &["fishplate-core"]),
    ("shm", &["fishplate-core"]),
    ("gpu", &["fishplate-core", "fishplate-shm"]),
    (".", &["fishplate-core", "fishplate-sys", "fishplate-shm", "fishplate-gpu"]),
    ("tests/testing", &["fishplate-sys"]),
    ("tool", &["fishplate-core", "fishplate-sys", "fishplate-shm", "fishplate-gpu", "fishplate"]),
    ("bindings/c", &["fishplate"]),
    ("bindings/python", &["fishplate"]),
    ("adapters/psm2", &["fishplate"]),
    ("adapters/nixl", &["fishplate"]),
    ("adapters/hfi1", &[]),
];

#[test]
fn packages_depend_only_on_lower_packages() {
    for (package, below) in PACKAGES {
        for other in
            dependencies(&manifest(package)).iter().filter(|name| name.starts_with("fishplate"))
        {
            assert!(below.contains(&other.as_str()), "{package} depends on {other}");
        }
    }
}

#[test]
fn libraries_start_no_thread_read_no_environment_and_set_no_handler() {
    for package in ["core", "sys", "shm", "gpu"] {
        for source in sources(package) {
            let tokens = tokens(&source.code);
            for path in [
                ["env", "var"],
                ["env", "var_os"],
                ["env", "vars"],
                ["thread", "spawn"],
                ["thread", "Builder"],
            ] {
                let named = tokens.windows(3).any(|three| three == [path[0], "::", path[1]]);
                assert!(
                    !named,
                    "{package}/src/{} names {}::{}",
                    source.path.display(),
                    path[0],
                    path[1]
                );
            }
            for word in ["getenv", "sigaction", "signal_hook", "pthread_create"] {
                assert!(
                    !tokens.contains(&word),
                    "{package}/src/{} names {word}",
                    source.path.display()
                );
            }
        }
    }
}

/// Returns the orderings stronger than relaxed, and the fences, that do not use `edge!` or
/// `edge_fence!`.
fn unnamed_orderings(code: &str) -> Vec<String> {
    let tokens = tokens(code);
    let mut found = vec![];
    for at in 2..tokens.len().saturating_sub(2) {
        match tokens[at..at + 3] {
            // A compiler fence needs no edge.
            ["Ordering", "::", _] if tokens[at - 2..at] == ["compiler_fence", "("] => {}
            ["Ordering", "::", "Relaxed" | "$"] => {}
            [
                "Ordering",
                "::",
                order @ ("Acquire" | "Release" | "AcqRel" | "SeqCst" | "{" | "*"),
            ] => {
                found.push(format!("Ordering::{order}"));
            }
            // The engine's own `fence` is a method.
            ["fence", "(", _] if !matches!(tokens[at - 1], "." | "fn") => {
                found.push("fence(".to_owned())
            }
            _ => {}
        }
    }
    found
}

#[test]
fn every_ordering_is_relaxed_or_an_edge() {
    // Skips the tool and the test package: no user's data depends on their orderings.
    let packages = PACKAGES.iter().map(|(package, _)| *package);
    for package in packages.filter(|package| !["tool", "tests/testing"].contains(package)) {
        for source in sources(package) {
            // Skips the facade, which defines `edge!`.
            if source.path == Path::new("sync/primitive.rs") {
                continue;
            }
            let mut found = unnamed_orderings(&source.code);
            // No model runs the fake driver and the Python bindings, so they may only use the
            // strongest ordering.
            if source.path.starts_with("fake") || package == "bindings/python" {
                found.retain(|found| !["Ordering::SeqCst", "fence("].contains(&found.as_str()));
            }
            // In the models a full fence precedes this store, so no model fails without the store's
            // ordering.
            if package == "adapters/psm2" && source.path == Path::new("lock.rs") {
                let store = found.iter().position(|found| found == "Ordering::Release");
                found.remove(store.expect("the store of `inside` that replaces another"));
            }
            assert!(found.is_empty(), "{package}/src/{}: {found:?}", source.path.display());
        }
    }
    for (code, count) in [
        ("let _ = word.load(Ordering::Acquire);", 1),
        ("use core::sync::atomic::Ordering::{Acquire, Release};", 1),
        ("{ atomic::fence(order); }", 1),
        ("let _ = (word.load(Ordering::Relaxed), engine.fence(context, peer));", 0),
        ("{ compiler_fence(Ordering::SeqCst); }", 0),
        ("let _ = word.load(edge!(\"ring.filled.load\", Acquire));", 0),
    ] {
        assert_eq!(unnamed_orderings(code).len(), count, "{code}");
    }
}

/// The endings of the files whose lines end at column 100.
const CHECKED: [&str; 10] = ["rs", "md", "sh", "toml", "c", "h", "cpp", "hpp", "py", "pyi"];

/// Collects sources, scripts, manifests and Markdown below a folder, except build output and hidden
/// files.
fn texts(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if path.is_dir() && !path.is_symlink() && name != "target" && !name.starts_with('.') {
            texts(&path, found);
        } else if path.is_file()
            && path.extension().is_some_and(|end| CHECKED.contains(&end.to_str().unwrap()))
        {
            found.push(path);
        }
    }
}

/// Returns the numbers and lengths of the lines over 100 columns that `checked` selects, except
/// lines with a URL.
fn long_lines(text: &str, checked: impl Fn(&str) -> bool) -> Vec<(usize, usize)> {
    let lines = text.lines().zip(1..).filter(|(line, _)| line.len() > 100);
    lines
        .map(|(line, number)| (number, line.chars().count(), line))
        .filter(|(_, columns, line)| *columns > 100 && !line.contains("://") && checked(line))
        .map(|(number, columns, _)| (number, columns))
        .collect()
}

fn is_comment(line: &str) -> bool {
    ["//", "# "].iter().any(|mark| line.trim_start().starts_with(mark))
}

/// Returns whether a line of code can end before column 100: it has two words and is no row of a
/// table, and no quoted text reaches over that column.
fn can_break(line: &str) -> bool {
    let start: String = line.chars().take(100).collect();
    let start = start.replace("\\\\", "").replace("\\\"", "").replace("\\'", "");
    let is_quoted = start.matches('"').count() % 2 == 1 || start.matches('\'').count() % 2 == 1;
    let is_row = line.matches(" | ").count() >= 3;
    is_comment(line) || !is_quoted && !is_row && line.trim().contains(' ')
}

#[test]
fn lines_end_at_column_100() {
    let is_prose = |line: &str| !line.trim_start().starts_with('|');
    let mut paths = vec![];
    texts(root(), &mut paths);
    assert!(paths.len() > 600, "only {} files found", paths.len());
    let mut found = vec![];
    for path in paths {
        let text = fs::read_to_string(&path).unwrap();
        let lines = match path.extension().unwrap().to_str().unwrap() {
            "md" => long_lines(&text, is_prose),
            _ => long_lines(&text, can_break),
        };
        let path = path.strip_prefix(root()).unwrap().display();
        found.extend(lines.iter().map(|(line, columns)| format!("{path}:{line}: {columns}")));
    }
    assert!(found.is_empty(), "shorten or break these lines, which end beyond 100: {found:#?}");
    let (long, longest) = ("x".repeat(97), "x".repeat(98));
    let [longest, linked] = [format!("/// {longest}"), format!("// {longest} https://x")];
    let text = format!("let a = 1;\n// {long}\n    // {long}\n{longest}\n{linked}\n");
    assert_eq!(long_lines(&text, is_comment), [(3, 104), (4, 102)]);
    let text = format!("| {long}xx |\n{long}xxxx\n  - {long}\n");
    assert_eq!(long_lines(&text, is_prose), [(2, 101), (3, 101)]);
    let text = format!("echo \"{long}\"\necho \"a\" {long}\n# it's {long}\na | b | c | d {long}\n");
    assert_eq!(long_lines(&text, can_break), [(2, 106), (3, 104)]);
}

#[test]
fn a_planted_breach_is_found() {
    let breaches =
        |path: &str, code: &str| layer_breaches(Path::new(path), &product_code(code).0).len();
    assert_eq!(breaches("sync/ring.rs", "use crate::rail::Rail;\n"), 1);
    assert_eq!(breaches("sync.rs", "use crate::{sync::seq::Seq, rail};\n"), 1);
    assert_eq!(
        breaches(
            "rail/loopback.rs",
            "use crate::{\n    sync::{ring, seq},\n    engine::Engine,\n};\n"
        ),
        1
    );
    assert_eq!(breaches("rail.rs", "fn f() -> super::engine::E {}\n"), 1);
    assert_eq!(breaches("engine/submit/single.rs", "use super::queue::Target;\n"), 0);
    assert_eq!(breaches("engine/worker.rs", "use super::super::{queue::Queue, rail};\n"), 1);
    assert_eq!(breaches("engine.rs", "use crate::{rail::{Rail, engine}, sync};\n"), 0);
    assert_eq!(breaches("rail.rs", "//! [`Engine`](crate::engine::Engine)\nuse crate::sync;\n"), 0);
    assert_eq!(
        breaches(
            "rail.rs",
            "#[cfg(test)]\nmod tests {\n    use crate::engine::E;\n}\nuse crate::sync;\n"
        ),
        0
    );
    assert_eq!(
        breaches("rail.rs", "#[cfg(test)]\nmod tests {\n    use a;\n}\nuse crate::engine;\n"),
        1
    );
    assert_eq!(
        product_code("#[cfg(test)]\nmod races;\n#[cfg(test)]\npub(crate) mod testing;\n").1,
        ["races", "testing"]
    );
    assert_eq!(
        dependencies(
            "[dependencies]\na = \"1\"\nb.workspace = true\n[dev-dependencies]\nc = \"1\"\n"
        ),
        ["a", "b"]
    );
    assert_eq!(
        dependencies(
            "[target.'cfg(x)'.dependencies]\nd = \"1\"\n[dependencies.e]\nversion = \"1\"\n"
        ),
        ["d", "e"]
    );
}
