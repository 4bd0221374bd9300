//! Checks JSON against the part of JSON Schema that `schema/*.json` uses.

use std::path::Path;

use serde_json::Value;

/// The keywords that are checked, and the keywords that only describe.
const CHECKED: [&str; 8] =
    ["type", "enum", "const", "minimum", "required", "properties", "additionalProperties", "items"];
const DESCRIBING: [&str; 4] = ["$schema", "$id", "title", "description"];

/// Loads a schema of this package.
pub fn load(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("schema").join(name);
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Checks a value against a schema. The error names the field and the reason.
pub fn check(schema: &Value, value: &Value, at: &str) -> Result<(), String> {
    let rules = schema.as_object().ok_or(format!("{at}: no schema"))?;
    let unknown =
        rules.keys().find(|key| ![&CHECKED[..], &DESCRIBING[..]].concat().contains(&key.as_str()));
    let no = |why: String| Err(format!("{at}: {value}: {why}"));
    if let Some(key) = unknown {
        return no(format!("the keyword {key} is not known here"));
    }
    if !rules.contains_key("description") {
        return no("it is not described".into());
    }
    let is = |kind: &Value| match kind.as_str() {
        Some("null") => value.is_null(),
        Some("boolean") => value.is_boolean(),
        Some("integer") => value.is_u64() || value.is_i64(),
        Some("number") => value.is_number(),
        Some("string") => value.is_string(),
        Some("array") => value.is_array(),
        Some("object") => value.is_object(),
        _ => false,
    };
    let kinds = |kind: &Value| kind.as_array().cloned().unwrap_or_else(|| vec![kind.clone()]);
    if rules.get("type").is_some_and(|kind| !kinds(kind).iter().any(is)) {
        return no(format!("not of type {}", rules["type"]));
    }
    if rules.get("const").is_some_and(|only| only != value) {
        return no(format!("not {}", rules["const"]));
    }
    if rules.get("enum").is_some_and(|some| !some.as_array().unwrap().contains(value)) {
        return no(format!("not one of {}", rules["enum"]));
    }
    let least = rules.get("minimum").and_then(Value::as_f64);
    if least.zip(value.as_f64()).is_some_and(|(least, value)| value < least) {
        return no(format!("below {}", rules["minimum"]));
    }
    if let (Some(items), Some(values)) = (rules.get("items"), value.as_array()) {
        values.iter().try_for_each(|value| check(items, value, at))?;
    }
    let Some(values) = value.as_object() else { return Ok(()) };
    let required = rules.get("required").and_then(Value::as_array);
    for name in required.into_iter().flatten() {
        if !values.contains_key(name.as_str().unwrap()) {
            return no(format!("{name} is missing"));
        }
    }
    for (name, value) in values {
        let known = rules.get("properties").and_then(|fields| fields.get(name));
        match known
            .or_else(|| rules.get("additionalProperties").filter(|schema| schema.is_object()))
        {
            Some(schema) => check(schema, value, &format!("{at}.{name}"))?,
            None => return no(format!("{name} is not in the schema")),
        }
    }
    Ok(())
}
