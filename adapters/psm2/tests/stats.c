/* Checks all 13 statistics of two endpoints of one process, for short and long messages, expected
   and unexpected. Also checks their pages of counters. */
#include <psm2.h>
#include <psm2_mq.h>
#include <string.h>
#include <unistd.h>

#include "must.h"

static psm2_ep_t ep[2];
static psm2_mq_t mq[2];
static psm2_epaddr_t to[2];
static char out[100000], in[100000];

static psm2_error_t connects (int from, psm2_epid_t id)
{
  psm2_error_t error;
  return psm2_ep_connect (ep[from], 1, &id, NULL, &error, &to[from], 20000000000);
}

static void message (unsigned len, int early)
{
  psm2_mq_tag_t tag = { { len, 0, 0, 0 } }, all = { { -1u, -1u, -1u, 0 } };
  psm2_mq_req_t reqs[2] = { NULL, NULL };
  psm2_mq_status2_t status;
  for (int turn = 0; turn < 2; turn++)
    if (turn == early)
      MUST (psm2_mq_isend2 (mq[0], to[0], 0, &tag, out, len, NULL, &reqs[0]) == PSM2_OK);
    else
      {
        /* Waits until the message in flight arrives. */
        while (turn == 1 && psm2_mq_iprobe2 (mq[1], to[1], &tag, &all, &status) != PSM2_OK)
          ;
        MUST (psm2_mq_irecv2 (mq[1], to[1], &tag, &all, 0, in, len, NULL, &reqs[1]) == PSM2_OK);
      }
  while (reqs[0] != NULL || reqs[1] != NULL)
    for (int side = 0; side < 2; side++)
      {
        psm2_poll (ep[side]);
        psm2_error_t error = psm2_mq_test2 (&reqs[side], &status);
        MUST (error == PSM2_OK || error == PSM2_MQ_NO_COMPLETIONS);
      }
}

/* Returns counter number AT from the page of the endpoint that was opened as number NODE. The
   layout is described in src/counters.rs. */
static uint64_t counter (uint64_t node, int at)
{
  uint64_t words[32];
  char path[64], name[64];
  for (int fd = 0; fd < 256; fd++)
    {
      snprintf (path, sizeof path, "/proc/self/fd/%d", fd);
      ssize_t len = readlink (path, name, sizeof name - 1);
      name[len < 0 ? 0 : len] = 0;
      if (strstr (name, "fishplate-counters") && pread (fd, words, sizeof words, 0) == sizeof words
          && words[3] == node)
        return words[8 + at];
    }
  return 0;
}

int main (void)
{
  setenv ("FISHPLATE_PSM2_COUNTERS", "1", 1);
  int major = PSM2_VERNO_MAJOR, minor = PSM2_VERNO_MINOR;
  struct psm2_ep_open_opts opts;
  psm2_uuid_t key = { 7 };
  psm2_epid_t id[2];
  psm2_mq_stats_t got[2], want[2];
  MUST (psm2_error_register_handler (NULL, PSM2_ERRHANDLER_NO_HANDLER) == PSM2_OK);
  MUST (psm2_init (&major, &minor) == PSM2_OK && psm2_ep_open_opts_get_defaults (&opts) == PSM2_OK);
  for (int side = 0; side < 2; side++)
    MUST (psm2_ep_open (key, &opts, &ep[side], &id[side]) == PSM2_OK
          && psm2_mq_init (ep[side], 0, NULL, 0, &mq[side]) == PSM2_OK);
  MUST (connects (0, id[1]) == PSM2_OK && connects (1, id[0]) == PSM2_OK);
  message (100, 1);
  message (200, 0);
  message (90000, 1);
  message (50000, 0);
  memset (want, 0, sizeof want);
  want[0].tx_num = want[0].tx_shm_num = 4;
  want[0].tx_eager_num = 2, want[0].tx_eager_bytes = 300;
  want[0].tx_rndv_num = 2, want[0].tx_rndv_bytes = 140000;
  want[1].rx_user_num = 2, want[1].rx_user_bytes = 90100;
  want[1].rx_sys_num = 2, want[1].rx_sys_bytes = 50200;
  want[1].rx_shm_num = 4;
  want[1].rx_sysbuf_num = 1, want[1].rx_sysbuf_bytes = 200;
  for (int side = 0; side < 2; side++)
    {
      psm2_mq_get_stats (mq[side], &got[side]);
      for (unsigned at = 0; at < PSM2_MQ_NUM_STATS; at++)
        {
          unsigned long is = ((uint64_t *) &got[side])[at], should = ((uint64_t *) &want[side])[at];
          if (is != should)
            return printf ("end %d, counter %u: %lu, not %lu\n", side, at, is, should), 1;
        }
    }
  /* Waits for the counters of posted and of arrived messages. */
  while (counter (0, 0) < 4 || counter (1, 1) < 4)
    for (int side = 0; side < 2; side++)
      psm2_poll (ep[side]);
  return 0;
}
