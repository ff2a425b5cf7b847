//! YAML trees with the position of each value.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{self, Deserialize, Deserializer, IntoDeserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;
use serde_saphyr::budget::BudgetBreach;
use serde_saphyr::options::DuplicateKeyPolicy;

use crate::limits::{SPEC_BYTES_MAX, VNETS_MAX};

/// Maximum number of documents in a file: all virtual networks and the substrate.
const DOCUMENTS_MAX: usize = VNETS_MAX + 1;

/// Maximum nesting of mappings and lists. Specs need 12 levels. Each
/// level takes up to 45 KiB of stack (measured without optimization).
const DEPTH_MAX: usize = 24;

/// Maximum number of values in a file. Each alias counts with all values that it expands to.
const VALUES_MAX: usize = 250_000;

/// Line and column, from 1.
pub type TextPosition = (u32, u32);

/// A value and its start.
#[derive(Clone, Debug)]
pub struct Tree {
    pub position: TextPosition,
    pub value: YamlValue,
}

/// A YAML value. Mappings keep their order and duplicate keys.
#[derive(Clone, Debug)]
pub enum YamlValue {
    Null,
    Bool(bool),
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Text(String),
    List(Vec<Tree>),
    Map(Vec<(TextPosition, String, Tree)>),
}

impl YamlValue {
    /// Name of its JSON type.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "boolean",
            Self::Unsigned(_) | Self::Signed(_) => "integer",
            Self::Float(_) => "number",
            Self::Text(_) => "string",
            Self::List(_) => "array",
            Self::Map(_) => "object",
        }
    }

    /// Returns a scalar as text; `None` for others.
    pub fn scalar(&self) -> Option<String> {
        match self {
            Self::Bool(value) => Some(value.to_string()),
            Self::Unsigned(value) => Some(value.to_string()),
            Self::Signed(value) => Some(value.to_string()),
            Self::Float(value) => Some(value.to_string()),
            Self::Text(text) => Some(text.clone()),
            Self::Null | Self::List(_) | Self::Map(_) => None,
        }
    }

    /// Returns the value of a mapping's key.
    pub fn get(&self, key: &str) -> Option<&Tree> {
        match self {
            Self::Map(entries) => entries.iter().find(|(_, k, _)| k == key).map(|(_, _, v)| v),
            _ => None,
        }
    }

    /// Returns the text of a mapping's key.
    pub fn text(&self, key: &str) -> Option<&str> {
        match &self.get(key)?.value {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Returns the value of a mapping's key, to change it.
    pub fn get_mut(&mut self, key: &str) -> Option<&mut Tree> {
        match self {
            Self::Map(entries) => entries.iter_mut().find(|(_, k, _)| k == key).map(|(_, _, v)| v),
            _ => None,
        }
    }
}

impl Tree {
    /// Returns the position of each value by its path. A scalar's
    /// position is its own; others have that of their key.
    pub fn positions(&self) -> BTreeMap<String, TextPosition> {
        let mut places = BTreeMap::new();
        self.collect_places(&JsonPointer::root(), self.position, &mut places);
        places
    }

    fn collect_places(
        &self,
        path: &JsonPointer,
        key: TextPosition,
        places: &mut BTreeMap<String, TextPosition>,
    ) {
        let place = match &self.value {
            YamlValue::List(items) => {
                for (index, item) in items.iter().enumerate() {
                    item.collect_places(&path.index(index), item.position, places);
                }
                key
            }
            YamlValue::Map(entries) => {
                for (key, name, item) in entries {
                    item.collect_places(&path.key(name), *key, places);
                }
                key
            }
            _ => self.position,
        };
        places.insert(path.0.clone(), place);
    }
}

/// Gives a tree's values to a type that takes any kind of value first, as types with a tag do.
impl<'de> Deserializer<'de> for &'de Tree {
    type Error = serde_json::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        match &self.value {
            YamlValue::Null => visitor.visit_unit(),
            YamlValue::Bool(value) => visitor.visit_bool(*value),
            YamlValue::Unsigned(value) => visitor.visit_u64(*value),
            YamlValue::Signed(value) => visitor.visit_i64(*value),
            YamlValue::Float(value) => visitor.visit_f64(*value),
            YamlValue::Text(text) => visitor.visit_borrowed_str(text),
            YamlValue::List(items) => visitor.visit_seq(SeqDeserializer::new(items.iter())),
            YamlValue::Map(entries) => {
                let entries = entries.iter().map(|(_, key, value)| (key.as_str(), value));
                visitor.visit_map(MapDeserializer::new(entries))
            }
        }
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
        unit unit_struct newtype_struct seq tuple tuple_struct map struct enum identifier
        ignored_any
    }
}

impl<'de> IntoDeserializer<'de, serde_json::Error> for &'de Tree {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

/// Path of a value in a document: a JSON pointer (RFC 6901).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JsonPointer(String);

impl JsonPointer {
    /// Path of the document.
    pub fn root() -> Self {
        Self(String::new())
    }

    /// Appends a key of a mapping.
    pub fn key(&self, key: &str) -> Self {
        Self(format!("{}/{}", self.0, key.replace('~', "~0").replace('/', "~1")))
    }

    /// Appends an index of a list.
    pub fn index(&self, index: usize) -> Self {
        Self(format!("{}/{index}", self.0))
    }

    /// Path of these keys from the document.
    pub fn of(keys: &[&str]) -> Self {
        keys.iter().fold(Self::root(), |path, key| path.key(key))
    }

    /// Returns its keys and indices.
    pub fn segments(&self) -> Vec<String> {
        self.0.split('/').skip(1).map(|s| s.replace("~1", "/").replace("~0", "~")).collect()
    }

    /// Returns the JSON pointer.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the parent's path; `None` for the document.
    pub fn parent(&self) -> Option<Self> {
        Some(Self(self.0[..self.0.rfind('/')?].to_owned()))
    }
}

/// Syntax error in YAML.
pub struct Syntax {
    pub place: TextPosition,
    pub message: String,
}

/// Parses the documents of a text; empty ones are omitted.
pub fn read(text: &str) -> Result<Vec<Tree>, Syntax> {
    if text.len() > SPEC_BYTES_MAX {
        let message = format!("{} bytes exceed the {SPEC_BYTES_MAX} of a spec file", text.len());
        return Err(Syntax { place: (1, 1), message });
    }
    let options = serde_saphyr::options! {
        duplicate_keys: DuplicateKeyPolicy::PassThrough,
        leading_zero_numbers_as_strings: true,
        underscored_numbers_as_strings: true,
        strict_booleans: true,
        with_snippet: false,
        // Many aliases of one anchor are allowed. The expansion
        // is limited: values and bytes count once per alias.
        budget: serde_saphyr::budget! {
            max_documents: DOCUMENTS_MAX,
            max_depth: DEPTH_MAX,
            max_nodes: VALUES_MAX,
            max_total_scalar_bytes: SPEC_BYTES_MAX,
            enforce_alias_anchor_ratio: false,
        },
    };
    let documents = serde_saphyr::from_multiple_with_options::<Located>(text, options);
    let documents = documents.map_err(|error| {
        let place =
            error.location().map_or((1, 1), |at| (at_least_1(at.line()), at_least_1(at.column())));
        let message = too_much(&error).unwrap_or_else(|| first_line(&error.to_string()));
        Syntax { place, message }
    })?;
    let trees = documents.into_iter().map(|document| document.0);
    Ok(trees.filter(|tree| !matches!(tree.value, YamlValue::Null)).collect())
}

/// Describes the reader's limit that a file exceeds.
fn too_much(error: &serde_saphyr::Error) -> Option<String> {
    let breach = match error {
        serde_saphyr::Error::AliasError { error, .. } => return too_much(error),
        serde_saphyr::Error::Budget { breach, .. } => breach,
        _ => return None,
    };
    let (what, max) = match breach {
        BudgetBreach::Depth { .. } => ("levels of mappings and lists", DEPTH_MAX),
        BudgetBreach::Documents { .. } => ("documents", DOCUMENTS_MAX),
        BudgetBreach::Nodes { .. } => ("values, with aliases expanded", VALUES_MAX),
        BudgetBreach::ScalarBytes { .. } => ("bytes, with aliases expanded", SPEC_BYTES_MAX),
        _ => return None,
    };
    Some(format!("a spec file has at most {max} {what}"))
}

fn at_least_1(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX).max(1)
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or("not YAML").to_owned()
}

/// Deserialization wrapper for [`Tree`].
struct Located(Tree);

impl<'de> Deserialize<'de> for Located {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Spanned { value, referenced, .. } = Spanned::<YamlAny>::deserialize(deserializer)?;
        let place = (at_least_1(referenced.line()), at_least_1(referenced.column()));
        Ok(Self(Tree { position: place, value: value.0 }))
    }
}

/// Deserialization wrapper for [`YamlValue`].
struct YamlAny(YamlValue);

impl<'de> Deserialize<'de> for YamlAny {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(YamlVisitor).map(Self)
    }
}

struct YamlVisitor;

impl<'de> Visitor<'de> for YamlVisitor {
    type Value = YamlValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a YAML value")
    }

    fn visit_unit<E: de::Error>(self) -> Result<YamlValue, E> {
        Ok(YamlValue::Null)
    }

    fn visit_none<E: de::Error>(self) -> Result<YamlValue, E> {
        Ok(YamlValue::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<YamlValue, D::Error> {
        deserializer.deserialize_any(self)
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<YamlValue, E> {
        Ok(YamlValue::Bool(value))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<YamlValue, E> {
        Ok(YamlValue::Unsigned(value))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<YamlValue, E> {
        Ok(u64::try_from(value).map_or(YamlValue::Signed(value), YamlValue::Unsigned))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<YamlValue, E> {
        Ok(YamlValue::Float(value))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<YamlValue, E> {
        Ok(YamlValue::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<YamlValue, A::Error> {
        let mut list = Vec::new();
        while let Some(Located(item)) = items.next_element()? {
            list.push(item);
        }
        Ok(YamlValue::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<YamlValue, A::Error> {
        let mut map = Vec::new();
        while let Some(key) = entries.next_key::<Spanned<String>>()? {
            let Located(value) = entries.next_value()?;
            let place = (at_least_1(key.referenced.line()), at_least_1(key.referenced.column()));
            map.push((place, key.value, value));
        }
        Ok(YamlValue::Map(map))
    }
}

/// An error at a position.
pub(crate) struct SchemaFault {
    pub position: (u32, u32),
    pub path: JsonPointer,
    pub message: String,
    pub hint: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::Object;

    #[test]
    fn objects_read_every_kind_of_value_as_from_json() {
        let text = "{kind: Tenant, apiVersion: pdp/v1, metadata: {name: a}, status: {none: ~, \
                    yes: true, one: 1, less: -1, half: 0.5, text: '7', list: [1, b], \
                    map: {c: d}}}";
        let trees = read(text).unwrap_or_else(|error| panic!("{}", error.message));
        let Object::Tenant(tenant) = Object::deserialize(&trees[0]).unwrap() else { panic!() };
        let expected = serde_json::json!({"none": null, "yes": true, "one": 1, "less": -1,
            "half": 0.5, "text": "7", "list": [1, "b"], "map": {"c": "d"}});
        assert_eq!(tenant.status.map(serde_json::Value::Object), Some(expected));
    }
}
