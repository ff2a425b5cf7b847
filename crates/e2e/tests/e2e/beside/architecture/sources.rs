//! Uses between a crate's modules, read from its sources.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::Path;

use syn::buffer::{Cursor, TokenBuffer};
use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};
use syn::{Attribute, Expr, FnArg, ImplItem, Item, Member, Meta, Pat, Token, TraitItem, Type};
use syn::{UseTree, Visibility};

use super::graph::Edges;

/// Methods of the standard library and of libraries. A call of such a name on a value of unknown
/// type is no edge.
const COMMON_METHODS: &str = "\
    abort accept add all and_then any append arg args as_bytes as_mut as_ref as_slice as_str \
    binary_search bind bits borrow bytes cancel chain chars checked_add chunks clear clone \
    cloned close cmp collect command concat connect contains contains_key copied count create \
    current_dir cycle deref detach drain drop elapsed encode end entry enumerate env eq exit \
    extend fill filter filter_map find first flat_map flatten flush fmt fold from_str get \
    get_mut hash id index insert inspect into_inner into_iter is_empty is_none is_some iter \
    iter_mut join keys kill last len line lines listen load lock map map_err matches max min mul \
    name ne new next nth open or_default or_else parse partition path peek poll pop pop_front \
    pos position product push push_str range read read_exact read_line recv remove repeat \
    replace report reserve reset resize retain rev rows run seek send set shrink shuffle \
    shutdown skip sleep sort source spawn split split_at split_off start starts_with status step \
    stop store strip_prefix sub sum swap sync take tell text then time to_owned to_string trim \
    truncate try_recv unpack unwrap update values wait wake windows with write write_all zip";

/// A module: its name (`a::b`, empty for the crate's root) and its items outside of tests.
pub struct Module {
    name: String,
    items: Vec<Item>,
}

impl Module {
    /// Parses a module's text, with its inline modules.
    pub fn parse(name: &str, text: &str) -> Vec<Self> {
        let file = syn::parse_file(text).unwrap_or_else(|error| panic!("{name}: {error}"));
        let mut all = Vec::new();
        Self::flatten(name, file.items, &mut all);
        all
    }

    fn flatten(name: &str, mut items: Vec<Item>, all: &mut Vec<Self>) {
        items.retain(|item| !is_test(attributes(item)));
        for item in &mut items {
            if let Item::Mod(module) = item
                && let Some((_, inside)) = &mut module.content
            {
                Self::flatten(&child(name, &module.ident.to_string()), inside.split_off(0), all);
            }
        }
        all.push(Self { name: name.into(), items });
    }

    /// Reads a file and the files of its modules.
    pub fn read(file: &Path) -> Vec<Self> {
        let folder = file.parent().expect("a folder");
        let mut all = Vec::new();
        Self::read_into(file, folder, "", &mut all);
        all
    }

    /// `folder` has the files of the modules inside this one.
    fn read_into(file: &Path, folder: &Path, name: &str, all: &mut Vec<Self>) {
        let text =
            fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let parsed = Self::parse(name, &text);
        for item in parsed.iter().filter(|it| it.name == name).flat_map(|it| &it.items) {
            let Item::Mod(module) = item else { continue };
            if module.semi.is_none() || module.attrs.iter().any(|it| it.path().is_ident("path")) {
                continue;
            }
            let ident = module.ident.to_string();
            let inside = folder.join(&ident);
            let flat = folder.join(format!("{ident}.rs"));
            let file = if flat.exists() { flat } else { inside.join("mod.rs") };
            Self::read_into(&file, &inside, &child(name, &ident), all);
        }
        all.extend(parsed);
    }
}

fn child(parent: &str, name: &str) -> String {
    if parent.is_empty() { name.into() } else { format!("{parent}::{name}") }
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(it) => &it.attrs,
        Item::Enum(it) => &it.attrs,
        Item::Fn(it) => &it.attrs,
        Item::Impl(it) => &it.attrs,
        Item::Macro(it) => &it.attrs,
        Item::Mod(it) => &it.attrs,
        Item::Static(it) => &it.attrs,
        Item::Struct(it) => &it.attrs,
        Item::Trait(it) => &it.attrs,
        Item::Type(it) => &it.attrs,
        Item::Use(it) => &it.attrs,
        _ => &[],
    }
}

/// True for `#[cfg(test)]` and `#[cfg(all(test, ...))]`.
fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().filter(|it| it.path().is_ident("cfg")).any(|it| {
        let Meta::List(list) = &it.meta else { return false };
        let text: String = list.tokens.to_string().split_whitespace().collect();
        text == "test" || text.starts_with("all(test,")
    })
}

/// Name of a type without references and owning pointers; `None` if it has no simple name.
fn type_name(of: &Type) -> Option<String> {
    match of {
        Type::Reference(it) => type_name(&it.elem),
        Type::Paren(it) => type_name(&it.elem),
        Type::Path(it) => {
            let last = it.path.segments.last()?;
            let name = last.ident.to_string();
            match &last.arguments {
                syn::PathArguments::AngleBracketed(inside)
                    if ["Arc", "Box", "Rc"].contains(&name.as_str()) =>
                {
                    inside.args.iter().find_map(|it| match it {
                        syn::GenericArgument::Type(it) => type_name(it),
                        _ => None,
                    })
                }
                _ => Some(name),
            }
        }
        _ => None,
    }
}

/// Names that a module declares or imports.
#[derive(Default)]
struct Names {
    items: BTreeSet<String>,
    uses: HashMap<String, Vec<String>>,
    globs: Vec<Vec<String>>,
}

/// A crate's modules and what they define.
#[derive(Default)]
pub struct Crate {
    modules: Vec<Module>,
    names: BTreeMap<String, Names>,
    /// Modules that define a method of this name in an inherent `impl` or a trait.
    methods: BTreeMap<String, BTreeSet<String>>,
    /// Modules with the function of a type, by the names of the type and the function.
    functions: BTreeMap<(String, String), BTreeSet<String>>,
    /// Types of fields, by the names of the struct and the field.
    fields: BTreeMap<(String, String), String>,
    types: BTreeSet<String>,
    macros: BTreeMap<String, BTreeSet<String>>,
}

impl Crate {
    pub fn new(modules: Vec<Module>) -> Self {
        let mut this = Self::default();
        for module in &modules {
            let mut names = Names::default();
            for item in &module.items {
                this.declare(&module.name, item, &mut names);
            }
            this.names.insert(module.name.clone(), names);
        }
        this.modules = modules;
        this
    }

    /// Names of all top-level modules.
    pub fn top(&self) -> BTreeSet<&str> {
        let names = self.names.keys().filter_map(|name| name.split("::").next());
        names.filter(|name| !name.is_empty()).collect()
    }

    /// Names of all methods that the crate defines.
    pub fn methods(&self) -> impl Iterator<Item = &str> {
        self.methods.keys().map(String::as_str)
    }

    fn declare(&mut self, module: &str, item: &Item, names: &mut Names) {
        let name = match item {
            Item::Const(it) => &it.ident,
            Item::Enum(it) => &it.ident,
            Item::Fn(it) => &it.sig.ident,
            Item::Static(it) => &it.ident,
            Item::Struct(it) => {
                for field in &it.fields {
                    if let (Some(name), Some(of)) = (&field.ident, type_name(&field.ty)) {
                        self.fields.insert((it.ident.to_string(), name.to_string()), of);
                    }
                }
                &it.ident
            }
            Item::Trait(it) => {
                for item in &it.items {
                    if let TraitItem::Fn(function) = item {
                        self.function(module, &it.ident.to_string(), &function.sig, true);
                    }
                }
                &it.ident
            }
            Item::Type(it) => &it.ident,
            Item::Impl(it) => {
                let Some(of) = type_name(&it.self_ty) else { return };
                for item in &it.items {
                    if let ImplItem::Fn(function) = item
                        && !is_test(&function.attrs)
                    {
                        self.function(module, &of, &function.sig, it.trait_.is_none());
                    }
                }
                return;
            }
            Item::Macro(it) => {
                if let Some(name) = &it.ident {
                    self.macros.entry(name.to_string()).or_default().insert(module.into());
                }
                return;
            }
            Item::Use(it) => return flatten_use(&it.tree, &mut Vec::new(), names),
            _ => return,
        };
        if matches!(item, Item::Enum(_) | Item::Struct(_) | Item::Trait(_)) {
            self.types.insert(name.to_string());
        }
        names.items.insert(name.to_string());
    }

    fn function(&mut self, module: &str, of: &str, signature: &syn::Signature, is_method: bool) {
        let name = signature.ident.to_string();
        if is_method && matches!(signature.inputs.first(), Some(FnArg::Receiver(_))) {
            self.methods.entry(name.clone()).or_default().insert(module.into());
        }
        self.functions.entry((of.into(), name)).or_default().insert(module.into());
    }

    /// Returns the module that defines what a path in `module` names; `None` if no module does.
    fn resolve(&self, module: &str, path: &[String], depth: usize) -> Option<&str> {
        let (first, rest) = path.split_first()?;
        match first.as_str() {
            "crate" => self.walk("", rest, depth).or_else(|| self.last("", rest)),
            "self" if !rest.is_empty() => {
                self.walk(module, rest, depth).or_else(|| self.last(module, rest))
            }
            "super" => {
                let mut parent = module.rsplit_once("::").map_or("", |(parent, _)| parent);
                let mut rest = rest;
                while rest.first().is_some_and(|it| it == "super") {
                    parent = parent.rsplit_once("::").map_or("", |(parent, _)| parent);
                    rest = &rest[1..];
                }
                self.walk(parent, rest, depth).or_else(|| self.last(parent, rest))
            }
            _ => self.walk(module, path, depth),
        }
    }

    /// Follows a path inside a module: to its modules, its items, and what it imports.
    fn walk(&self, module: &str, path: &[String], depth: usize) -> Option<&str> {
        let (key, names) = self.names.get_key_value(module)?;
        let Some((first, rest)) = path.split_first() else { return Some(key) };
        let inside = child(module, first);
        if self.names.contains_key(&inside) {
            return self.walk(&inside, rest, depth).or_else(|| self.last(&inside, rest));
        }
        if names.items.contains(first) {
            return Some(key);
        }
        if depth == 0 {
            return None;
        }
        if let Some(used) = names.uses.get(first) {
            let path: Vec<String> = used.iter().chain(rest).cloned().collect();
            return self.resolve(module, &path, depth - 1);
        }
        names.globs.iter().find_map(|used| {
            let path: Vec<String> = used.iter().chain(path).cloned().collect();
            let found = self.resolve(module, &path, depth - 1)?;
            // A module with such a glob, but without the name, does not define it.
            let last = path.last().expect("a name");
            self.names[found].items.contains(last).then_some(found)
        })
    }

    /// Returns the deepest module on a path. It is the one that defines an unknown item.
    fn last(&self, module: &str, path: &[String]) -> Option<&str> {
        let (key, _) = self.names.get_key_value(module)?;
        let macros = path.last().filter(|_| path.len() == 1).and_then(|it| self.macros.get(it));
        match macros.and_then(only) {
            Some(module) => Some(module),
            None => Some(key),
        }
    }

    /// Returns the edges between modules. `foreign` has the names of methods of other crates.
    pub fn edges(&self, foreign: &BTreeSet<&str>) -> Edges {
        let mut edges = Edges::new();
        for module in &self.modules {
            let mut reader = Reader {
                of: self,
                foreign,
                module: &module.name,
                self_type: None,
                locals: HashMap::new(),
                edges: &mut edges,
            };
            module.items.iter().for_each(|item| reader.visit_item(item));
        }
        edges
    }
}

/// Returns the only element.
fn only(set: &BTreeSet<String>) -> Option<&str> {
    set.first().filter(|_| set.len() == 1).map(String::as_str)
}

fn flatten_use(tree: &UseTree, before: &mut Vec<String>, names: &mut Names) {
    match tree {
        UseTree::Path(it) => {
            before.push(it.ident.to_string());
            flatten_use(&it.tree, before, names);
            before.pop();
        }
        UseTree::Name(it) if it.ident == "self" => {
            let name = before.last().cloned().unwrap_or_default();
            names.uses.insert(name, before.clone());
        }
        UseTree::Name(it) => {
            let path = before.iter().cloned().chain([it.ident.to_string()]).collect();
            names.uses.insert(it.ident.to_string(), path);
        }
        UseTree::Rename(it) => {
            let mut path = before.clone();
            path.extend((it.ident != "self").then(|| it.ident.to_string()));
            names.uses.insert(it.rename.to_string(), path);
        }
        UseTree::Glob(_) => names.globs.push(before.clone()),
        UseTree::Group(it) => it.items.iter().for_each(|it| flatten_use(it, before, names)),
    }
}

/// Collects the edges of one module.
struct Reader<'a> {
    of: &'a Crate,
    foreign: &'a BTreeSet<&'a str>,
    module: &'a str,
    /// Type of `self`.
    self_type: Option<String>,
    /// Types of parameters and variables.
    locals: HashMap<String, String>,
    edges: &'a mut Edges,
}

impl Reader<'_> {
    fn edge(&mut self, to: Option<&str>, cause: &str) {
        if let Some(to) = to.filter(|to| *to != self.module) {
            let edge = (self.module.to_owned(), to.to_owned());
            self.edges.entry(edge).or_default().insert(cause.into());
        }
    }

    fn path(&mut self, path: &[String]) {
        let of = self.of;
        let to = of.resolve(self.module, path, 8);
        let cause = path.join("::");
        self.edge(to, &cause);
        if let [.., of_type, name] = path {
            let of_type = match of_type.as_str() {
                "Self" => self.self_type.clone().unwrap_or_default(),
                _ if to.is_none() => return,
                other => other.to_owned(),
            };
            self.edge(of.functions.get(&(of_type, name.clone())).and_then(only), &cause);
        }
    }

    /// Type of an expression, if it is easy to tell.
    fn type_of(&self, expression: &Expr) -> Option<String> {
        match expression {
            Expr::Path(it) => {
                let name = it.path.get_ident()?.to_string();
                if name == "self" {
                    self.self_type.clone()
                } else {
                    self.locals.get(&name).cloned()
                }
            }
            Expr::Field(it) => match &it.member {
                Member::Named(name) => {
                    let field = (self.type_of(&it.base)?, name.to_string());
                    self.of.fields.get(&field).cloned()
                }
                Member::Unnamed(_) => None,
            },
            Expr::Reference(it) => self.type_of(&it.expr),
            Expr::Paren(it) => self.type_of(&it.expr),
            _ => None,
        }
    }

    /// Notes a call of a method on a value of this type.
    fn method(&mut self, of_type: Option<String>, name: &str) {
        let (of, cause) = (self.of, format!(".{name}()"));
        if let Some(of_type) = of_type.filter(|it| of.types.contains(it))
            && let Some(found) = of.functions.get(&(of_type, name.to_owned()))
        {
            return self.edge(only(found), &cause);
        }
        if !COMMON_METHODS.split(' ').any(|it| it == name) && !self.foreign.contains(name) {
            self.edge(of.methods.get(name).and_then(only), &cause);
        }
    }

    /// Reads tokens that are no expressions: paths and calls of methods.
    fn tokens(&mut self, mut at: Cursor) {
        let mut path: Vec<String> = Vec::new();
        let mut after_dot = false;
        while !at.eof() {
            if let Some((name, next)) = at.ident() {
                let name = name.to_string();
                at = next;
                if after_dot {
                    if at.any_group().is_some() || is_colons(at).is_some() {
                        self.method(None, &name);
                    }
                } else {
                    path.push(name);
                    if let Some(next) = is_colons(at) {
                        at = next;
                        continue;
                    }
                    self.path(&path);
                }
                path.clear();
                after_dot = false;
                continue;
            }
            if !path.is_empty() {
                self.path(&path);
                path.clear();
            }
            if let Some((inside, _, _, next)) = at.any_group() {
                self.tokens(inside);
                at = next;
                after_dot = false;
            } else if let Some((literal, next)) = at.literal() {
                let text = literal.to_string();
                let text = text.trim_matches('"');
                if ["crate::", "super::", "self::"].iter().any(|it| text.starts_with(it)) {
                    self.path(&text.split("::").map(str::to_owned).collect::<Vec<_>>());
                }
                at = next;
                after_dot = false;
            } else if let Some((_, next)) = at.token_tree() {
                after_dot = at.punct().is_some_and(|(it, _)| it.as_char() == '.');
                at = next;
            }
        }
    }

    fn parameters(&mut self, signature: &syn::Signature) {
        self.locals.clear();
        for input in &signature.inputs {
            if let FnArg::Typed(input) = input
                && let Pat::Ident(name) = &*input.pat
                && let Some(of) = type_name(&input.ty)
            {
                self.locals.insert(name.ident.to_string(), of);
            }
        }
    }
}

/// Returns the place after `::`.
fn is_colons(at: Cursor) -> Option<Cursor> {
    let (first, next) = at.punct()?;
    let (second, next) = next.punct()?;
    (first.as_char() == ':' && second.as_char() == ':').then_some(next)
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        // What the root of a crate publishes is no use of it.
        if self.module.is_empty() && !matches!(item.vis, Visibility::Inherited) {
            return;
        }
        let mut names = Names::default();
        flatten_use(&item.tree, &mut Vec::new(), &mut names);
        names.uses.values().for_each(|path| self.path(path));
        for path in &names.globs {
            self.path(path);
        }
    }

    fn visit_visibility(&mut self, _: &'ast Visibility) {}

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        self.self_type = type_name(&item.self_ty);
        visit::visit_item_impl(self, item);
        self.self_type = None;
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.self_type = Some(item.ident.to_string());
        visit::visit_item_trait(self, item);
        self.self_type = None;
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if !is_test(&item.attrs) {
            self.parameters(&item.sig);
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !is_test(&item.attrs) {
            self.parameters(&item.sig);
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_local(&mut self, local: &'ast syn::Local) {
        visit::visit_local(self, local);
        let names = match &local.pat {
            Pat::Type(it) => vec![&*it.pat],
            other => vec![other],
        };
        for name in names {
            if let Pat::Ident(name) = name {
                self.locals.remove(&name.ident.to_string());
            }
        }
        if let Pat::Type(it) = &local.pat
            && let (Pat::Ident(name), Some(of)) = (&*it.pat, type_name(&it.ty))
        {
            self.locals.insert(name.ident.to_string(), of);
        }
    }

    fn visit_expr_closure(&mut self, closure: &'ast syn::ExprClosure) {
        for input in &closure.inputs {
            if let Pat::Ident(name) = input {
                self.locals.remove(&name.ident.to_string());
            }
        }
        visit::visit_expr_closure(self, closure);
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        let of_type = self.type_of(&call.receiver);
        self.method(of_type, &call.method.to_string());
        visit::visit_expr_method_call(self, call);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() {
            let names = path.segments.iter().map(|segment| segment.ident.to_string());
            self.path(&names.collect::<Vec<_>>());
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        let name = call.path.get_ident().map(ToString::to_string).unwrap_or_default();
        let of = self.of;
        self.edge(of.macros.get(&name).and_then(only), &format!("{name}!"));
        visit::visit_path(self, &call.path);
        match call.parse_body_with(Punctuated::<Expr, Token![,]>::parse_terminated) {
            Ok(body) => body.iter().for_each(|expression| self.visit_expr(expression)),
            Err(_) => self.tokens(TokenBuffer::new2(call.tokens.clone()).begin()),
        }
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        if let Meta::List(list) = &attribute.meta {
            self.tokens(TokenBuffer::new2(list.tokens.clone()).begin());
        }
    }
}
