//! YAML as a tree that knows where each value is.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;
use serde_saphyr::budget::BudgetBreach;
use serde_saphyr::options::DuplicateKeyPolicy;

use crate::limits::{SPEC_BYTES_MAX, VNETS_MAX};

/// Documents of a file: all virtual networks and the substrate.
const DOCUMENTS_MAX: usize = VNETS_MAX + 1;

/// Levels of mappings and lists in each other. Specs need 12. Each level takes up to 45 KiB of stack (measured without
/// optimization).
const DEPTH_MAX: usize = 24;

/// Values of a file, counted once for each alias that stands for them.
const VALUES_MAX: usize = 250_000;

/// Line and column, from 1.
pub type Place = (u32, u32);

/// A value and where it begins.
#[derive(Clone, Debug)]
pub struct Tree {
    pub place: Place,
    pub value: Value,
}

/// A YAML value. Mappings keep their order, and keys that are given twice.
#[derive(Clone, Debug)]
pub enum Value {
    Null,
    Bool(bool),
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Text(String),
    List(Vec<Tree>),
    Map(Vec<(Place, String, Tree)>),
}

impl Value {
    /// The JSON type's name.
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

    /// A scalar as text; `None` for others.
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

    /// The value of a mapping's key.
    pub fn get(&self, key: &str) -> Option<&Tree> {
        match self {
            Self::Map(entries) => entries.iter().find(|(_, k, _)| k == key).map(|(_, _, v)| v),
            _ => None,
        }
    }

    /// The text of a mapping's key.
    pub fn text(&self, key: &str) -> Option<&str> {
        match &self.get(key)?.value {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// As JSON; of keys that are given twice the last counts.
    pub fn to_json(&self) -> serde_json::Value {
        match self {
            Self::Null => serde_json::Value::Null,
            Self::Bool(value) => (*value).into(),
            Self::Unsigned(value) => (*value).into(),
            Self::Signed(value) => (*value).into(),
            Self::Float(value) => (*value).into(),
            Self::Text(text) => text.as_str().into(),
            Self::List(items) => items.iter().map(|item| item.value.to_json()).collect(),
            Self::Map(entries) => {
                entries.iter().map(|(_, k, v)| (k.clone(), v.value.to_json())).collect()
            }
        }
    }
}

impl Tree {
    /// Where each value is, by its path: scalars where they begin, others where their key
    /// does.
    pub fn places(&self) -> BTreeMap<String, Place> {
        let mut places = BTreeMap::new();
        self.collect_places(&Path::root(), self.place, &mut places);
        places
    }

    fn collect_places(&self, path: &Path, key: Place, places: &mut BTreeMap<String, Place>) {
        let place = match &self.value {
            Value::List(items) => {
                for (index, item) in items.iter().enumerate() {
                    item.collect_places(&path.index(index), item.place, places);
                }
                key
            }
            Value::Map(entries) => {
                for (key, name, item) in entries {
                    item.collect_places(&path.key(name), *key, places);
                }
                key
            }
            _ => self.place,
        };
        places.insert(path.0.clone(), place);
    }
}

/// Where in a document a value is: a JSON pointer (RFC 6901).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Path(String);

impl Path {
    /// The document.
    pub fn root() -> Self {
        Self(String::new())
    }

    /// A key of the mapping here.
    pub fn key(&self, key: &str) -> Self {
        Self(format!("{}/{}", self.0, key.replace('~', "~0").replace('/', "~1")))
    }

    /// An item of the list here.
    pub fn index(&self, index: usize) -> Self {
        Self(format!("{}/{index}", self.0))
    }

    /// A path of keys from the document.
    pub fn of(keys: &[&str]) -> Self {
        keys.iter().fold(Self::root(), |path, key| path.key(key))
    }

    /// What it goes by: keys and indices.
    pub fn segments(&self) -> Vec<String> {
        self.0.split('/').skip(1).map(|s| s.replace("~1", "/").replace("~0", "~")).collect()
    }

    /// The pointer.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The path of what holds this; `None` for the document.
    pub fn parent(&self) -> Option<Self> {
        Some(Self(self.0[..self.0.rfind('/')?].to_owned()))
    }
}

/// Why a text is not YAML.
pub struct Syntax {
    pub place: Place,
    pub message: String,
}

/// The documents of a text; empty ones are left out.
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
        // Many aliases of one anchor are no fault. What they stand for is bounded: values and bytes, each alias counted
        // as what it is replaced by.
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
    Ok(trees.filter(|tree| !matches!(tree.value, Value::Null)).collect())
}

/// Words for a bound of the reader that a file exceeds.
fn too_much(error: &serde_saphyr::Error) -> Option<String> {
    let breach = match error {
        serde_saphyr::Error::AliasError { error, .. } => return too_much(error),
        serde_saphyr::Error::Budget { breach, .. } => breach,
        _ => return None,
    };
    let (what, max) = match breach {
        BudgetBreach::Depth { .. } => ("levels of mappings and lists", DEPTH_MAX),
        BudgetBreach::Documents { .. } => ("documents", DOCUMENTS_MAX),
        BudgetBreach::Nodes { .. } => ("values, with those that aliases stand for", VALUES_MAX),
        BudgetBreach::ScalarBytes { .. } => {
            ("bytes, with those that aliases stand for", SPEC_BYTES_MAX)
        }
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

/// A [`Tree`] as serde reads it.
struct Located(Tree);

impl<'de> Deserialize<'de> for Located {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Spanned { value, referenced, .. } = Spanned::<Any>::deserialize(deserializer)?;
        let place = (at_least_1(referenced.line()), at_least_1(referenced.column()));
        Ok(Self(Tree { place, value: value.0 }))
    }
}

/// A [`Value`] as serde reads it.
struct Any(Value);

impl<'de> Deserialize<'de> for Any {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyVisitor).map(Self)
    }
}

struct AnyVisitor;

impl<'de> Visitor<'de> for AnyVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a YAML value")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_none<E: de::Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Unsigned(value))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Value, E> {
        Ok(u64::try_from(value).map_or(Value::Signed(value), Value::Unsigned))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Value, E> {
        Ok(Value::Float(value))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Value, E> {
        Ok(Value::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(Located(item)) = items.next_element()? {
            list.push(item);
        }
        Ok(Value::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut map = Vec::new();
        while let Some(key) = entries.next_key::<Spanned<String>>()? {
            let Located(value) = entries.next_value()?;
            let place = (at_least_1(key.referenced.line()), at_least_1(key.referenced.column()));
            map.push((place, key.value, value));
        }
        Ok(Value::Map(map))
    }
}
