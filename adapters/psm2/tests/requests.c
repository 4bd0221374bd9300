/* Many open requests: posts COUNT receives from the endpoint to itself and matches them in a
   different order. With "all", COUNT is the maximum, and one more receive is refused. */
#include <psm2.h>
#include <psm2_mq.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define MUST(condition)                                               \
  do                                                                  \
    if (!(condition))                                                 \
      {                                                               \
        printf ("line %d, %u: not so: %s\n", __LINE__, n, #condition); \
        exit (1);                                                     \
      }                                                               \
  while (0)

int main (int argc, char **argv)
{
  int full = argc > 1 && argv[1][0] == 'a';
  uint32_t count = full ? 1 << 20 : argc > 1 ? strtoul (argv[1], NULL, 10) : 40000, n = 0;
  uint32_t *got = calloc (count, sizeof *got);
  psm2_mq_req_t *reqs = calloc (count, sizeof *reqs), more;
  struct psm2_ep_open_opts opts;
  int major = PSM2_VERNO_MAJOR, minor = PSM2_VERNO_MINOR;
  psm2_uuid_t key = { 7 };
  psm2_ep_t ep;
  psm2_epid_t epid;
  psm2_error_t error;
  psm2_epaddr_t self;
  psm2_mq_t mq;
  psm2_mq_status2_t status;
  psm2_mq_tag_t tag = { { 0 } }, all = { { -1u, -1u, -1u, 0 } };

  MUST (got && reqs && psm2_error_register_handler (NULL, PSM2_ERRHANDLER_NO_HANDLER) == PSM2_OK);
  MUST (psm2_init (&major, &minor) == PSM2_OK && psm2_ep_open_opts_get_defaults (&opts) == PSM2_OK);
  MUST (psm2_ep_open (key, &opts, &ep, &epid) == PSM2_OK
        && psm2_mq_init (ep, 0, NULL, 0, &mq) == PSM2_OK);
  MUST (psm2_ep_connect (ep, 1, &epid, NULL, &error, &self, 5000000000) == PSM2_OK);
  for (n = 0; n < count; n++)
    {
      tag.tag[0] = n;
      MUST (psm2_mq_irecv2 (mq, self, &tag, &all, 0, &got[n], 4, &got[n], &reqs[n]) == PSM2_OK);
    }
  if (full)
    {
      MUST (psm2_mq_irecv2 (mq, self, &tag, &all, 0, &got[0], 4, NULL, &more) == PSM2_NO_MEMORY);
      MUST (psm2_mq_isend2 (mq, self, 0, &tag, got, 4, NULL, &more) == PSM2_NO_MEMORY);
      MUST (psm2_mq_send2 (mq, self, 0, &tag, got, 100000) == PSM2_NO_MEMORY);
      /* A short blocking send takes no request. */
      MUST (psm2_mq_send2 (mq, self, 0, &tag, got, 4) == PSM2_OK);
      /* A completed request makes room for a new request. */
      n = 0;
      MUST (psm2_mq_cancel (&reqs[0]) == PSM2_OK && psm2_mq_test2 (&reqs[0], &status) == PSM2_OK);
      MUST (psm2_mq_irecv2 (mq, self, &tag, &all, 0, &got[0], 4, NULL, &reqs[0]) == PSM2_OK);
      return 0;
    }
  /* If COUNT is no multiple of the prime 7919, this visits every number below COUNT once. */
  for (uint32_t k = 0; k < count; k++)
    {
      n = (uint64_t) k * 7919 % count;
      tag.tag[0] = n;
      MUST (psm2_mq_send2 (mq, self, 0, &tag, &n, 4) == PSM2_OK);
    }
  for (n = 0; n < count; n++)
    MUST (psm2_mq_wait2 (&reqs[n], &status) == PSM2_OK && status.error_code == PSM2_OK
          && got[n] == n && status.context == &got[n] && status.msg_tag.tag[0] == n);
  MUST (psm2_mq_finalize (mq) == PSM2_OK
        && psm2_ep_close (ep, PSM2_EP_CLOSE_GRACEFUL, 5000000000) == PSM2_OK);
  return psm2_finalize ();
}
