//! `pdp images`: images of registries and archives that the daemon keeps.

use std::process::ExitCode;

use clap::Subcommand;
use pdp_api::client::Client;
use pdp_api::{ImageInfo, ImageQuery, PullRequest};

use crate::daemon::complete;
use crate::failure::CliFailure;
use crate::output::words::mebibytes;
use crate::output::{Format, ProgressDisplay, or_dash, print, report, table, write};

/// Digits shown of a digest.
const DIGITS: usize = 12;

/// List, pull and remove images of registries and archives that the daemon keeps.
///
/// Applying a spec pulls the images that it names and the daemon lacks. Each tenant has its own
/// images.
#[derive(Debug, clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Example: pdp images\n         pdp images pull frrouting/frr:latest\n         \
                        pdp images rm registry.example/frr:10\n         pdp images prune"
)]
pub struct ImagesArgs {
    #[command(subcommand)]
    pub action: Option<ImagesAction>,
    #[command(flatten)]
    pub list: ImagesListArgs,
}

#[derive(Debug, clap::Args)]
pub struct ImagesListArgs {
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
}

#[derive(Debug, Subcommand)]
pub enum ImagesAction {
    /// List images: names, digest, size, and the nodes that run on them.
    #[command(visible_alias = "ls")]
    List(ImagesListArgs),
    /// Pull the current image of a name. Running nodes keep theirs; the next `pdp apply` uses the
    /// new one.
    Pull {
        /// Name of the image, in docker's notation.
        #[arg(add = complete::images())]
        image: String,
        /// Pull for this tenant.
        #[arg(long, value_name = "NAME")]
        tenant: Option<String>,
    },
    /// Remove images that no node runs on.
    #[command(visible_alias = "remove")]
    Rm {
        /// Names, digests, or beginnings of these.
        #[arg(required = true, add = complete::images())]
        images: Vec<String>,
        /// Only images of this tenant.
        #[arg(long, value_name = "NAME")]
        tenant: Option<String>,
    },
    /// Remove all images that no node runs on.
    Prune {
        /// Only images of this tenant.
        #[arg(long, value_name = "NAME")]
        tenant: Option<String>,
    },
}

pub async fn images(client: &Client, args: ImagesArgs) -> Result<ExitCode, CliFailure> {
    match args.action.unwrap_or(ImagesAction::List(args.list)) {
        ImagesAction::List(list) => print(list.format, &client.images().await?, |images| {
            if images.is_empty() {
                return "no images; a spec's `image: NAME` or `pdp images pull NAME` gets one\n"
                    .into();
            }
            let rows = images.iter().map(|image| {
                [
                    or_dash(image.tenant.clone().unwrap_or_default()),
                    or_dash(image.problem.clone().unwrap_or(image.names.join(", "))),
                    or_dash(digits(image)),
                    mebibytes(image.packed_bytes),
                    mebibytes(image.unpacked_bytes),
                    or_dash(image.used_by.join(", ")),
                ]
            });
            table(["TENANT", "IMAGE", "DIGEST", "SIZE", "UNPACKED", "USED BY"], rows.collect())
        }),
        ImagesAction::Pull { image, tenant } => {
            let mut shown = ProgressDisplay::new();
            let request = PullRequest { image, tenant };
            let result = client.pull_image(&request, |step| shown.step(step)).await;
            drop(shown);
            report(Format::Table, &result?)
        }
        ImagesAction::Rm { images, tenant } => {
            let query = ImageQuery { tenant };
            for image in images {
                client.delete_image(&image, &query).await?;
                write(format!("{image} is removed\n").as_bytes())?;
            }
            Ok(ExitCode::SUCCESS)
        }
        ImagesAction::Prune { tenant } => {
            let gone = client.prune_images(&ImageQuery { tenant }).await?;
            let bytes = gone.iter().map(|image| image.packed_bytes + image.unpacked_bytes).sum();
            let names = gone.iter().map(|image| match image.names.is_empty() {
                true => format!("{} is removed\n", digits(image)),
                false => format!("{} is removed\n", image.names.join(", ")),
            });
            let mut text: String = names.collect();
            text += &format!("{} removed, {} free\n", gone.len(), mebibytes(bytes));
            write(text.as_bytes())
        }
    }
}

fn digits(image: &ImageInfo) -> String {
    image.digest.trim_start_matches("sha256:").chars().take(DIGITS).collect()
}
