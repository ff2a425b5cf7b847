//! Tips for verbs of other tools: the verb of `pdp` to use instead.

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Verbs of other tools, and the tip for each.
const TIPS: [(&[&str], &str); 15] = [
    (&["status", "ps", "ls", "show"], "pdp get lists vnets, pdp inspect VNET shows one"),
    (&["describe", "info"], "pdp inspect VNET shows a vnet, pdp inspect VNET/NODE a node"),
    (&["destroy", "remove", "rm", "del"], "pdp delete VNET forgets a vnet, pdp down stops all"),
    (
        &["deploy", "create", "add", "run"],
        "pdp up FILE starts the daemon if none answers and applies a file, pdp apply FILE applies it",
    ),
    (&["start"], "pdp up starts the daemon and all that is stored, pdp up FILE applies a file too"),
    (&["stop", "kill", "halt"], "pdp down stops all, pdp delete VNET forgets a vnet"),
    (&["reload"], "pdp restart VNET/NODE restarts a node, pdp apply FILE applies a changed file"),
    (
        &["update", "configure", "set"],
        "pdp apply FILE applies differences, pdp link set changes a link",
    ),
    (&["ssh", "attach", "console", "connect"], "pdp shell VNET/NODE opens a shell in a node"),
    (&["save", "backup"], "pdp export VNET --save -o DIR writes a vnet with its nodes' files"),
    (&["copy", "scp"], "pdp cp FILE VNET/NODE:PATH copies a file into a node"),
    (&["tcpdump", "sniff", "dump"], "pdp capture VNET/NODE:PORT -w FILE writes frames as pcap"),
    (&["pull"], "pdp images pull NAME pulls an image; apply pulls those of the specs"),
    (
        &["rmi", "prune"],
        "pdp images rm NAME removes an image, pdp images prune removes all unused ones",
    ),
    (
        &["monitor"],
        "pdp top shows all vnets, pdp events shows events, pdp stats --watch shows counters",
    ),
];

/// Returns the tip for a command line with another tool's verb; `None` if clap's message is better.
pub fn tip(error: &clap::Error) -> Option<String> {
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        Some(ContextValue::StyledStr(text)) => Some(text.to_string()),
        _ => None,
    };
    let word = context(ContextKind::InvalidSubcommand)?;
    // Verbs below another verb get no tips.
    let top = context(ContextKind::Usage)?.contains("pdp [OPTIONS]");
    let known = error.kind() == ErrorKind::InvalidSubcommand && top;
    let (_, tip) = TIPS.iter().find(|(words, _)| known && words.contains(&word.as_str()))?;
    Some(format!("no such command: {word:?}; {tip}"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::{CommandFactory, Parser};

    use super::*;
    use crate::args::Args;

    #[test]
    fn tips_name_existing_verbs_and_hide_none() {
        let command = Args::command();
        let verbs: BTreeSet<&str> = command
            .get_subcommands()
            .flat_map(|v| v.get_all_aliases().chain([v.get_name()]))
            .collect();
        for (words, tip) in TIPS {
            for word in words {
                assert!(!verbs.contains(word), "{word}");
                let error = Args::try_parse_from(["pdp", word]).unwrap_err();
                assert!(super::tip(&error).is_some_and(|text| text.ends_with(tip)), "{word}");
            }
            for part in tip.split("pdp ").skip(1) {
                assert!(verbs.contains(part.split(' ').next().unwrap()), "{tip}");
            }
        }
    }

    #[test]
    fn clap_handles_misspelled_verbs_and_subcommands() {
        for words in [&["pdp", "aply"][..], &["pdp", "token", "ls"], &["pdp", "apply", "ls", "-x"]]
        {
            assert_eq!(tip(&Args::try_parse_from(words).unwrap_err()), None, "{words:?}");
        }
    }
}
